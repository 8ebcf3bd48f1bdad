#!/bin/bash
touch left-by-the-agent
grep -c ERROR server.log > answer.txt
