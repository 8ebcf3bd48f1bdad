#!/bin/bash
sort -u words.txt > sorted.txt
