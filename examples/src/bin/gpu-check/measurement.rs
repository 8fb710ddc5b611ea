//! What this program measures itself: each in a process of its own that has a deadline, since a GPU or NCCL may hang.

use clap::ValueEnum;

#[cfg(feature = "nccl")]
use crate::bandwidth;
use crate::optimizer;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Measurement {
    /// An AdamW step
    Adamw,
    /// all_reduce between all GPUs
    #[cfg(feature = "nccl")]
    AllReduce,
}

impl Measurement {
    /// Measures, and prints what came out; the last line is the result.
    pub fn print(self, num_gpus: usize) -> anyhow::Result<()> {
        let result = match self {
            Self::Adamw => optimizer::measure()?,
            #[cfg(feature = "nccl")]
            Self::AllReduce => bandwidth::measure(num_gpus)?,
        };
        let _ = num_gpus;
        println!("{result}");
        Ok(())
    }

    /// The arguments with which this program does it.
    pub fn arguments(self) -> [String; 2] {
        let value = self.to_possible_value().expect("no value is hidden");
        ["--measure".to_string(), value.get_name().to_string()]
    }
}
