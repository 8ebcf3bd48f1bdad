#!/bin/bash
(while true; do echo tick >> /app/ticks; sleep 0.05; done) > /dev/null 2>&1 < /dev/null &
disown
