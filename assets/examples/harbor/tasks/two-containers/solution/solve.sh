#!/bin/bash
redis-cli -h store get answer > /app/answer.txt
