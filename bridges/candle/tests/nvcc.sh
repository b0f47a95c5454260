#!/bin/sh
# Stands in for nvcc where the feature `cuda` is only compiled, not linked: prints a version, and creates each
# output that is asked for.
case "$*" in *--version*) echo "Cuda compilation tools, release 13.0, V13.0.0"; exit 0;; esac
while [ $# -gt 0 ]; do
  case "$1" in
    -o|--output-file) shift; : > "$1";;
    --output-directory|-odir) shift; dir="$1"; mkdir -p "$dir";;
    *.cu) src="$1";;
  esac
  shift
done
[ -n "$dir" ] && : > "$dir/$(basename "${src%.cu}").ptx"
exit 0
