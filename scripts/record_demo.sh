#!/usr/bin/env bash
# Record the demo's terminal as an animated picture, docs/assets/demo.svg. Waits are shortened; arguments are the demo's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./run setup
python3 -m venv .cache/record
.cache/record/bin/python -m pip install --quiet --no-deps -r requirements/record.txt
.cache/record/bin/termtosvg docs/assets/demo.svg --command ".venv/bin/python -m examples.photographs $*" \
  --template window_frame --screen-geometry 80x26 --min-frame-duration 50 --max-frame-duration 1500 --loop-delay 6000
