"""What is sent when: state machines without MPI, TensorFlow, threads, a clock or I/O."""
