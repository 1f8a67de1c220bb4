"""What a measurement on a GPU needs beside ``bench.capture_overhead``."""
