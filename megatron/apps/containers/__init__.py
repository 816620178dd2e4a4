"""Run a command in a container: command lines for docker, podman, apptainer and pyxis."""
