#!/bin/sh
# Compiles the workspace's own crates for loom. Cargo runs it in place of rustc (build.rustc-workspace-wrapper), so that
# the crates of others are those that the tests use.
exec "$@" --cfg loom
