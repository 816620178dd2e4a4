# shellcheck shell=bash
# Waits for a process of this shell to end, and returns its status. A signal that this shell traps
# ends bash's `wait`, and not the process.
await() { # PID
    while kill -0 "$1" 2>/dev/null; do
        wait "$1" || true
    done
    wait "$1"
}
