#!/bin/bash
echo "$GREETING" > "$TARGET"
