"""Programs: the command line, the demo and the benches; the only place that prints and parses arguments."""
