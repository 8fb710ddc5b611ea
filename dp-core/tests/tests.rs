//! Integration tests of dp-core.

mod trainer_smoke;
