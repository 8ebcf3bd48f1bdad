#!/bin/bash
sed -i 's/^port = .*/port = 8443/; s/^host = .*/host = 0.0.0.0/' etc/server.conf
