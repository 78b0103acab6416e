"""Command-line tools beside training: doctor, bench, simulate, report, timeline, top, the Horovod build."""
