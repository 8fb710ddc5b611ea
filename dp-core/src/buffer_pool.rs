//! Flat buffers that serve many buckets in turn.

use std::collections::HashSet;

use candle_core::DType;

use crate::bucket::BucketLayout;
use crate::buffer::Buffer;
use crate::error::Result;
use crate::memory::{Category, Ledger};
use crate::precision::not_trainable;

/// Up to `max` flat buffers of one dtype, each large enough for the largest bucket that needs them, so that steps after the
/// first allocate nothing.
#[derive(Debug)]
pub struct BufferPool {
    dtype: DType,
    capacity: usize,
    max: usize,
    free: Vec<Buffer>,
    allocated: usize,
    ledger: Ledger,
}

impl BufferPool {
    /// An empty pool; `capacity` in elements.
    pub fn new(dtype: DType, capacity: usize, max: usize, ledger: &Ledger) -> Self {
        Self {
            dtype,
            capacity,
            max,
            free: Vec::new(),
            allocated: 0,
            ledger: ledger.clone(),
        }
    }

    /// True if [`lend`](Self::lend) stays within the bound.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty() || self.allocated < self.max
    }

    /// A buffer of `len` elements, of unspecified contents; one more than `max` if need be.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn lend(&mut self, len: usize) -> Result<Buffer> {
        let mut buffer = match self.free.pop() {
            Some(buffer) => buffer,
            None => {
                self.allocated += 1;
                let capacity = self.capacity.max(len);
                Buffer::reserved(self.dtype, capacity, &self.ledger, Category::Communication)?
            }
        };
        buffer.resize(len);
        Ok(buffer)
    }

    /// Ends the loan.
    pub fn give_back(&mut self, buffer: Buffer) {
        if self.allocated > self.max {
            self.allocated -= 1;
            drop(buffer);
        } else {
            self.free.push(buffer);
        }
    }
}

/// What a ZeRO stage lends, a [`BufferPool`] per dtype: for gradients, which are filled while an earlier bucket is reduced, one
/// of each parameter dtype and one more; and two at a time to gather parameters in.
#[derive(Debug)]
pub struct BufferPools(Vec<BufferPool>);

impl BufferPools {
    /// Pools for all buckets of `layout`; nothing is allocated yet.
    pub fn new(layout: &BucketLayout, ledger: &Ledger) -> Self {
        let buckets = || layout.buckets().iter();
        let mut pools: Vec<BufferPool> = Vec::new();
        for dtype in buckets().flat_map(|b| [b.grad_dtype, b.dtype]) {
            if pools.iter().any(|p| p.dtype == dtype) {
                continue;
            }
            let users = buckets().filter(|b| b.grad_dtype == dtype || b.dtype == dtype);
            let capacity = users.map(|b| b.padded_len).max().unwrap_or(0);
            let filling = buckets().filter(|b| b.grad_dtype == dtype);
            let filling: HashSet<&str> = filling.map(|b| b.dtype.as_str()).collect();
            let max = (filling.len() + 1).max(2);
            pools.push(BufferPool::new(dtype, capacity, max, ledger));
        }
        Self(pools)
    }

    /// See [`BufferPool::has_room`].
    pub fn has_room(&self, dtype: DType) -> bool {
        self.0.iter().any(|p| p.dtype == dtype && p.has_room())
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
        let pool = self.0.iter_mut().find(|p| p.dtype == dtype);
        pool.ok_or_else(|| not_trainable("a bucket", dtype))
    }
}
