//! The layout of gradient buckets: which parameter lies where.
//!
//! Trained parameters, in *reverse creation order* (about the order in which their gradients appear), fill flat buckets
//! up to a cap; each dtype has its own. Each bucket is padded to a multiple of the world size `N`, and slice `r` of every bucket,
//! `[r * padded_len / N, (r+1) * padded_len / N)`, belongs to rank `r` where state is sharded; parameter boundaries do
//! not matter. This is Megatron-LM's distributed-optimizer layout; caps are those of PyTorch's
//! `DistributedDataParallel` (`bucket_cap_mb` 25, first bucket 1 MiB), less for small models.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::DType;

use crate::error::{Error, Result};
use crate::param::ParamKind;
use crate::param_spec::ParamSpec;
use crate::precision::{GradAccumDType, has_master};

/// Size limits of gradient buckets, in bytes of the gradients as they are kept ([`GradAccumDType`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketCaps {
    first: usize,
    rest: usize,
    /// See [`BucketCaps::fit`].
    fits: bool,
}

impl Default for BucketCaps {
    /// 1 MiB for the first bucket, so that communication starts early. For the others 25 MiB, or an eighth of all gradients
    /// if that is less, but not below 1 MiB: in one or two buckets a small model would have nothing to overlap, and the two
    /// transient buckets of ZeRO stage 2 would be larger than the gradients that it spares.
    fn default() -> Self {
        Self {
            first: 1 << 20,
            rest: 25 << 20,
            fits: true,
        }
    }
}

impl BucketCaps {
    /// A bucket holds at most this part of all gradients, unless caps are given.
    const LEAST_BUCKETS: usize = 8;

    /// All buckets up to `bytes`; the first one at most 1 MiB.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0.
    pub fn new(bytes: usize) -> Result<Self> {
        Self::with_first(bytes.min(Self::default().first), bytes)
    }

    /// The first bucket (the one whose gradients appear first) up to `first` bytes, the others up to `rest`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if either is 0.
    pub fn with_first(first: usize, rest: usize) -> Result<Self> {
        if first == 0 {
            return Err(Error::invalid(
                "first_bucket_cap",
                "a bucket holds at least one byte, got 0",
            ));
        }
        if rest == 0 {
            return Err(Error::invalid(
                "bucket_cap",
                "a bucket holds at least one byte, got 0",
            ));
        }
        Ok(Self {
            first,
            rest,
            fits: false,
        })
    }

    /// The caps of a model with `bytes` of gradients: the default ones may be less, given ones stay as they are.
    #[must_use]
    pub fn fit(self, bytes: usize) -> Self {
        let rest = match self.fits {
            true => (bytes / Self::LEAST_BUCKETS).clamp(self.first, self.rest),
            false => self.rest,
        };
        Self {
            rest,
            fits: false,
            ..self
        }
    }

    /// Cap of the first bucket, in bytes.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Cap of the other buckets, in bytes; of the default caps before they are [fit](Self::fit): at most.
    pub fn rest(&self) -> usize {
        self.rest
    }
}

impl fmt::Display for BucketCaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} and {} bytes", self.first, self.rest)?;
        match self.fits {
            true => write!(f, " or 1/{} of the gradients", Self::LEAST_BUCKETS),
            false => Ok(()),
        }
    }
}

/// Where one parameter lies in its bucket.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BucketSlot {
    /// Position in [`ParamStore::params`](crate::ParamStore::params).
    pub param_idx: usize,
    /// Elements of the bucket that are this parameter, in row-major order.
    pub range: Range<usize>,
}

/// One bucket.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Bucket {
    /// The parameters, in bucket order.
    pub slots: Vec<BucketSlot>,
    /// The dtype of the parameters.
    pub dtype: DType,
    /// The dtype of their gradients between backward and step.
    pub grad_dtype: DType,
    /// Elements with the padding: a multiple of the world size.
    pub padded_len: usize,
    /// `bucket 0: w, b`: goes with the bucket's collectives.
    pub label: Arc<str>,
}

impl Bucket {
    /// Elements without the padding.
    pub fn len(&self) -> usize {
        self.slots.last().map_or(0, |s| s.range.end)
    }

    /// True if all its parameters are empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True if who owns an element keeps a f32 master of it: where parameters are 16-bit numbers.
    pub fn has_masters(&self) -> bool {
        has_master(self.dtype)
    }

    /// The elements that `rank` owns where state is sharded.
    pub fn slice(&self, rank: usize, world_size: usize) -> Range<usize> {
        let shard_len = self.padded_len / world_size;
        rank * shard_len..(rank + 1) * shard_len
    }

    /// The parts of parameters inside `owned`, a range of this bucket.
    pub fn segments(&self, owned: Range<usize>) -> impl Iterator<Item = Segment> + '_ {
        self.slots.iter().filter_map(move |slot| {
            let start = slot.range.start.max(owned.start);
            let end = slot.range.end.min(owned.end);
            (start < end).then(|| Segment {
                param_idx: slot.param_idx,
                in_param: start - slot.range.start..end - slot.range.start,
                in_bucket: start..end,
                in_owned: start - owned.start..end - owned.start,
            })
        })
    }
}

/// A part of one parameter, seen from three sides. All ranges have the same length.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Segment {
    /// Position in [`ParamStore::params`](crate::ParamStore::params).
    pub param_idx: usize,
    /// Elements of the parameter.
    pub in_param: Range<usize>,
    /// Elements of the bucket.
    pub in_bucket: Range<usize>,
    /// Elements of the owned range, which optimizer state and sharded gradients are indexed by.
    pub in_owned: Range<usize>,
}

/// All buckets of a model.
#[derive(Debug, Clone)]
pub struct BucketLayout {
    buckets: Vec<Bucket>,
    caps: BucketCaps,
    world_size: usize,
    /// Bucket and slot of each parameter; `None` for what is not trained.
    places: Vec<Option<(usize, usize)>>,
    /// Begins the labels of all collectives of the trainer.
    prefix: String,
}

impl BucketLayout {
    /// Lays out the trained ones of `params` for `world_size` ranks. `order` lists all positions in `params` in creation
    /// order, and is the same on all ranks. A parameter larger than the cap gets a bucket of its own.
    ///
    /// One bucket per dtype is filled at a time, so that a few parameters of another dtype (f32 norms in a bf16 model) share
    /// a bucket. Buckets are numbered in the order in which they are complete.
    pub fn new(
        params: &[ParamSpec],
        order: &[usize],
        caps: BucketCaps,
        grad_accum: GradAccumDType,
        world_size: usize,
    ) -> Self {
        let trained = params.iter().filter(|p| p.kind == ParamKind::Trained);
        let bytes = |p: &ParamSpec| p.num_elements() * grad_accum.of(p.dtype).size_in_bytes();
        let caps = caps.fit(trained.map(bytes).sum());
        let mut layout = Self {
            buckets: Vec::new(),
            caps,
            world_size,
            places: vec![None; params.len()],
            prefix: String::new(),
        };
        let mut filling: Vec<(DType, Vec<BucketSlot>)> = Vec::new();
        for &param_idx in order.iter().rev() {
            let param = &params[param_idx];
            if param.kind != ParamKind::Trained {
                continue;
            }
            let cap = if layout.buckets.is_empty() {
                caps.first
            } else {
                caps.rest
            };
            let dtype = param.dtype;
            let mut slots = match filling.iter().position(|(d, _)| *d == dtype) {
                // The one that was added to last is closed last.
                Some(at) => filling.remove(at).1,
                None => Vec::new(),
            };
            let mut start = slots.last().map_or(0, |s| s.range.end);
            let bytes = (start + param.num_elements()) * grad_accum.of(dtype).size_in_bytes();
            if bytes > cap && start > 0 {
                layout.close(std::mem::take(&mut slots), params, dtype, grad_accum);
                start = 0;
            }
            slots.push(BucketSlot {
                param_idx,
                range: start..start + param.num_elements(),
            });
            filling.push((dtype, slots));
        }
        for (dtype, slots) in filling {
            layout.close(slots, params, dtype, grad_accum);
        }
        layout
    }

    fn close(
        &mut self,
        slots: Vec<BucketSlot>,
        params: &[ParamSpec],
        dtype: DType,
        grad_accum: GradAccumDType,
    ) {
        let index = self.buckets.len();
        for (i, slot) in slots.iter().enumerate() {
            self.places[slot.param_idx] = Some((index, i));
        }
        let names: Vec<&str> = slots
            .iter()
            .map(|s| params[s.param_idx].name.as_str())
            .collect();
        let len = slots.last().map_or(0, |s| s.range.end);
        self.buckets.push(Bucket {
            padded_len: len.next_multiple_of(self.world_size),
            dtype,
            grad_dtype: grad_accum.of(dtype),
            label: format!("bucket {index}: {}", names.join(", ")).into(),
            slots,
        });
    }

    /// Says in all labels which trainer of its rank the layout belongs to, so that two trainers of the same model are never
    /// taken for each other. The first one, mostly the only one, is not mentioned.
    #[must_use]
    pub(crate) fn of_trainer(mut self, number: u64) -> Self {
        if number > 0 {
            self.prefix = format!("trainer {}, ", number + 1);
            for bucket in &mut self.buckets {
                bucket.label = format!("{}{}", self.prefix, bucket.label).into();
            }
        }
        self
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The buckets, in the order in which they are reduced.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The size limits, [fit](BucketCaps::fit) to the model.
    pub fn caps(&self) -> BucketCaps {
        self.caps
    }

    /// Number of ranks the padding is for.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Bucket and slot of a parameter; `None` if it is not trained.
    pub fn place(&self, param_idx: usize) -> Option<(usize, usize)> {
        self.places.get(param_idx).copied().flatten()
    }

    /// Elements of all buckets with padding.
    pub fn padded_len(&self) -> usize {
        self.buckets.iter().map(|b| b.padded_len).sum()
    }

    /// Elements of the largest bucket with padding.
    pub fn max_padded_len(&self) -> usize {
        self.buckets.iter().map(|b| b.padded_len).max().unwrap_or(0)
    }
}
