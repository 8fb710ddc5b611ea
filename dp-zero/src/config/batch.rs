//! The three sizes of a batch, of which two give the third.

use std::fmt;

use super::ConfigError;

/// How a global batch is made: `train_batch_size = micro_batch_size * accumulation_steps * world_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchSizes {
    /// Samples of one optimizer step on all ranks together (`train_batch_size`).
    pub train_batch_size: usize,
    /// Samples of one forward and backward on one rank (`train_micro_batch_size_per_gpu`).
    pub micro_batch_size: usize,
    /// Micro-batches of one step (`gradient_accumulation_steps`).
    pub accumulation_steps: usize,
    /// Ranks.
    pub world_size: usize,
}

const TRAIN: &str = "train_batch_size";
const MICRO: &str = "train_micro_batch_size_per_gpu";
const STEPS: &str = "gradient_accumulation_steps";

impl BatchSizes {
    /// From the sizes that are given. DeepSpeed's rules, but what does not divide is an error: DeepSpeed rounds, and fails later.
    pub(super) fn resolve(
        train: Option<u64>,
        micro: Option<u64>,
        steps: Option<u64>,
        world_size: usize,
    ) -> Result<Self, ConfigError> {
        let size = |key: &str, size: Option<u64>| match size.map(usize::try_from) {
            None => Ok(None),
            Some(Ok(n)) if n > 0 => Ok(Some(n)),
            _ => Err(ConfigError::invalid(
                key,
                "must be at least 1, and a size that memory can hold",
            )),
        };
        let (train, micro, steps) = (
            size(TRAIN, train)?,
            size(MICRO, micro)?,
            size(STEPS, steps)?,
        );
        let product = |a: usize, b: usize, key: &str| {
            let product = a.checked_mul(b).and_then(|p| p.checked_mul(world_size));
            product.ok_or_else(|| ConfigError::invalid(key, "the batch is larger than any memory"))
        };
        let divided =
            |train: usize, by: usize, key: &str| match train.is_multiple_of(by * world_size) {
                true => Ok(train / by / world_size),
                false => Err(ConfigError::contradiction(
                    TRAIN,
                    key,
                    format!(
                        "a batch of {train} is not a multiple of {by} on each of {world_size} ranks"
                    ),
                )),
            };
        let (train, micro, steps) = match (train, micro, steps) {
            (Some(train), Some(micro), Some(steps)) => {
                let product = product(micro, steps, STEPS)?;
                if train != product {
                    return Err(ConfigError::contradiction(
                        TRAIN,
                        format!("{MICRO} * {STEPS}"),
                        format!(
                            "{train} is not {micro} * {steps} * {world_size} ranks = {product}"
                        ),
                    ));
                }
                (train, micro, steps)
            }
            (Some(train), Some(micro), None) => {
                product(micro, 1, MICRO)?;
                (train, micro, divided(train, micro, MICRO)?)
            }
            (Some(train), None, steps) => {
                let (by, key) = (
                    steps.unwrap_or(1),
                    if steps.is_some() {
                        STEPS
                    } else {
                        "the number of ranks"
                    },
                );
                product(by, 1, STEPS)?;
                (train, divided(train, by, key)?, by)
            }
            (None, Some(micro), steps) => {
                let steps = steps.unwrap_or(1);
                (product(micro, steps, STEPS)?, micro, steps)
            }
            (None, None, _) => {
                return Err(ConfigError::invalid(
                    TRAIN,
                    format!("is not there, and neither is {MICRO}; one of them is needed"),
                ));
            }
        };
        Ok(Self {
            train_batch_size: train,
            micro_batch_size: micro,
            accumulation_steps: steps,
            world_size,
        })
    }

    /// What a sum of the gradients of all micro-batches is divided by, to be a mean: `accumulation_steps * world_size`.
    pub fn divisor(&self) -> usize {
        self.accumulation_steps * self.world_size
    }
}

impl fmt::Display for BatchSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "batch of {} = {} per micro-batch x {} micro-batches x {} ranks; sums of gradients are divided by {}",
            self.train_batch_size,
            self.micro_batch_size,
            self.accumulation_steps,
            self.world_size,
            self.divisor()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(
        train: Option<u64>,
        micro: Option<u64>,
        steps: Option<u64>,
    ) -> Result<[usize; 3], String> {
        let sizes = BatchSizes::resolve(train, micro, steps, 2).map_err(|e| e.to_string())?;
        assert_eq!(
            sizes.train_batch_size,
            sizes.micro_batch_size * sizes.divisor()
        );
        Ok([
            sizes.train_batch_size,
            sizes.micro_batch_size,
            sizes.accumulation_steps,
        ])
    }

    #[test]
    fn any_two_give_the_third() {
        let expected = Ok([24, 3, 4]);
        assert_eq!(sizes(Some(24), Some(3), Some(4)), expected);
        assert_eq!(sizes(Some(24), Some(3), None), expected);
        assert_eq!(sizes(Some(24), None, Some(4)), expected);
        assert_eq!(sizes(None, Some(3), Some(4)), expected);
        assert_eq!(sizes(Some(24), None, None), Ok([24, 12, 1]));
        assert_eq!(sizes(None, Some(3), None), Ok([6, 3, 1]));
    }

    #[test]
    fn what_does_not_fit_names_both_keys() {
        let says = |sizes: Result<[usize; 3], String>, words: &[&str]| {
            assert!(
                sizes
                    .as_ref()
                    .is_err_and(|e| words.iter().all(|w| e.contains(w))),
                "{sizes:?}"
            );
        };
        says(
            sizes(Some(24), Some(3), Some(5)),
            &[TRAIN, MICRO, STEPS, "30"],
        );
        says(sizes(Some(24), Some(5), None), &[TRAIN, MICRO, "2 ranks"]);
        says(sizes(Some(24), None, Some(5)), &[TRAIN, STEPS]);
        says(sizes(Some(25), None, None), &[TRAIN, "ranks"]);
        says(sizes(None, None, Some(4)), &[TRAIN, MICRO]);
        says(sizes(Some(0), None, None), &[TRAIN, "at least 1"]);
        says(
            sizes(None, Some(1 << 62), Some(8)),
            &["larger than any memory"],
        );
        says(
            sizes(Some(8), Some(u64::MAX), None),
            &["larger than any memory"],
        );
    }
}
