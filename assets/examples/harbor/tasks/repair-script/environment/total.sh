#!/bin/bash
echo $(( ${1:-0} + ${2:-0} ))
