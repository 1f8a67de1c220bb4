"""The demo: a real SGLang on the CPU, a real sshd of its own, and the whole journey told with fleetdump's commands."""
