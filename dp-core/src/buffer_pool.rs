//! Flat buffers that serve many buckets in turn.

use std::collections::HashSet;

use candle_core::{DType, Device};

use crate::bucket::{Bucket, BucketLayout};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::memory::{Category, Ledger};
use crate::precision::not_trainable;
use crate::store::ParamStore;

/// Buffers of one dtype that serve buckets in turn: how many, and how long. Pools are made from it, and predictions too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSize {
    /// Of the elements.
    pub dtype: DType,
    /// Elements of each buffer: the longest bucket that it serves, with padding.
    pub capacity: usize,
    /// Number of buffers; no more than there are buckets, of which each holds one at most.
    pub count: usize,
}

impl PoolSize {
    /// `None` if there is nothing to serve.
    fn of<'a>(
        dtype: DType,
        buckets: impl Iterator<Item = &'a Bucket>,
        most: usize,
    ) -> Option<Self> {
        let lens: Vec<usize> = buckets.map(|b| b.padded_len).collect();
        Some(Self {
            dtype,
            capacity: lens.iter().copied().max()?,
            count: most.min(lens.len()),
        })
    }

    /// For ZeRO stage 1: two buffers for each parameter dtype that cannot be gathered in the buffers of its gradients, which
    /// are of another one. None on one rank, which gathers nothing.
    pub fn to_gather(layout: &BucketLayout) -> Vec<Self> {
        let gathered = |b: &&Bucket| layout.world_size() > 1 && b.grad_dtype != b.dtype;
        let buckets = || layout.buckets().iter().filter(gathered);
        distinct(buckets().map(|b| b.dtype))
            .filter_map(|dtype| Self::of(dtype, buckets().filter(|b| b.dtype == dtype), 2))
            .collect()
    }

    /// For ZeRO stage 2. Gradients are filled in while an earlier bucket is reduced: one buffer for each dtype of
    /// parameters, and one more. The same buffers, or else two others, gather parameters.
    pub fn to_reduce_and_gather(layout: &BucketLayout) -> Vec<Self> {
        let gathers = layout.world_size() > 1;
        let buckets = || layout.buckets().iter();
        let gradients = buckets().map(|b| b.grad_dtype);
        let parameters = buckets().filter(|_| gathers).map(|b| b.dtype);
        distinct(gradients.chain(parameters))
            .filter_map(|dtype| {
                let filling = buckets().filter(|b| b.grad_dtype == dtype);
                let num_filling = distinct(filling.map(|b| b.dtype)).count();
                let serves = |b: &&Bucket| b.grad_dtype == dtype || (gathers && b.dtype == dtype);
                Self::of(dtype, buckets().filter(serves), (num_filling + 1).max(2))
            })
            .collect()
    }

    /// To send gradients in `communication_dtype`: one bucket is converted while another one is on its way. `None` if all
    /// gradients are of this dtype.
    pub fn to_convert(layout: &BucketLayout, communication_dtype: DType) -> Option<Self> {
        let converted = |b: &&Bucket| b.grad_dtype != communication_dtype;
        Self::of(
            communication_dtype,
            layout.buckets().iter().filter(converted),
            2,
        )
    }

    /// Bytes of all buffers.
    pub fn num_bytes(&self) -> u64 {
        (self.count * self.capacity * self.dtype.size_in_bytes()) as u64
    }
}

/// Each of them once, in the order in which they come first.
fn distinct(dtypes: impl Iterator<Item = DType>) -> impl Iterator<Item = DType> {
    let mut seen = HashSet::new();
    dtypes.filter(move |dtype| seen.insert(dtype.as_str()))
}

/// The buffers of a [`PoolSize`], all allocated when the pool is made: a step needs no more memory than the one before it.
#[derive(Debug)]
pub struct BufferPool {
    size: PoolSize,
    free: Vec<Buffer>,
    allocated: usize,
    device: Device,
    ledger: Ledger,
}

impl BufferPool {
    /// Allocates all buffers, on `device`, entered as communication in `ledger`.
    ///
    /// # Errors
    /// If one cannot be allocated.
    pub fn new(size: PoolSize, device: &Device, ledger: &Ledger) -> Result<Self> {
        let mut pool = Self {
            size,
            free: Vec::with_capacity(size.count),
            allocated: size.count,
            device: device.clone(),
            ledger: ledger.clone(),
        };
        for _ in 0..size.count {
            let buffer = pool.allocate(size.capacity)?;
            pool.free.push(buffer);
        }
        Ok(pool)
    }

    fn allocate(&self, capacity: usize) -> Result<Buffer> {
        let (dtype, category) = (self.size.dtype, Category::Communication);
        Buffer::reserved_on(dtype, capacity, &self.device, &self.ledger, category)
    }

    /// True if [`lend`](Self::lend) needs no further buffer.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// A buffer of `len` elements, of unspecified contents; a further one for the time of the loan if need be.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn lend(&mut self, len: usize) -> Result<Buffer> {
        let mut buffer = match self.free.pop() {
            Some(buffer) => buffer,
            None => {
                self.allocated += 1;
                self.allocate(self.size.capacity.max(len))?
            }
        };
        buffer.resize(len)?;
        Ok(buffer)
    }

    /// Ends the loan.
    pub fn give_back(&mut self, buffer: Buffer) {
        if self.allocated > self.size.count {
            self.allocated -= 1;
            drop(buffer);
        } else {
            self.free.push(buffer);
        }
    }
}

/// What a ZeRO stage lends: a [`BufferPool`] per dtype.
#[derive(Debug)]
pub struct BufferPools(Vec<BufferPool>);

impl BufferPools {
    /// Allocates the buffers of all `sizes`, whose dtypes differ, on the device of `store`, and enters them in its ledger.
    ///
    /// # Errors
    /// If one cannot be allocated.
    pub fn new(sizes: &[PoolSize], store: &ParamStore) -> Result<Self> {
        let (device, ledger) = (store.device(), store.ledger());
        let pools = sizes
            .iter()
            .map(|size| BufferPool::new(*size, device, ledger));
        Ok(Self(pools.collect::<Result<_>>()?))
    }

    /// See [`BufferPool::has_room`].
    pub fn has_room(&self, dtype: DType) -> bool {
        self.0.iter().any(|p| p.size.dtype == dtype && p.has_room())
    }

    /// See [`BufferPool::lend`].
    ///
    /// # Errors
    /// If it cannot be allocated; [`Error::UnsupportedDType`](crate::Error::UnsupportedDType) for a dtype that no bucket has.
    pub fn lend(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        self.of(dtype)?.lend(len)
    }

    /// See [`BufferPool::give_back`].
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`](crate::Error::UnsupportedDType) for a dtype that no bucket has.
    pub fn give_back(&mut self, buffer: Buffer) -> Result<()> {
        self.of(buffer.dtype())?.give_back(buffer);
        Ok(())
    }

    fn of(&mut self, dtype: DType) -> Result<&mut BufferPool> {
        let pool = self.0.iter_mut().find(|p| p.size.dtype == dtype);
        pool.ok_or_else(|| not_trainable("a bucket", dtype))
    }
}
