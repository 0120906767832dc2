"""What the benchmark commands measure; everything here returns rows and prints nothing."""
