"""The TensorFlow and Keras side."""
