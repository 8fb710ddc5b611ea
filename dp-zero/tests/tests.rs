//! Integration tests of dp-zero.
