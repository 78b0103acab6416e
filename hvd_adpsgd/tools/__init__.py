"""Programs beside training: doctor, microbenchmarks, the Horovod build."""
