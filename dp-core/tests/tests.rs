//! Integration tests of dp-core: one binary, a module per topic. World sizes are written in the tests, every test that
//! runs ranks has a hang guard.

/// Shared vocabulary: guarded worlds, probe parameters, reproducible numbers, processes of their own.
mod support;

/// Worlds: threads, stacks, environment, what is left when they end.
mod world;

/// Ranks that disagree, fail, leave or are late: the same typed error everywhere, in time.
mod failure;

/// Collectives against values computed by hand: results, bytes, what is refused.
mod comm;

mod gathering;

/// Collectives of the shared-memory backend against the naive one, bit by bit: every dtype, many lengths, delays.
mod oracle;

/// ParamStore: initial values, ties, frozen parameters, files, life times.
mod store;

/// ParamShapes: the parameters of a model without its memory.
mod shapes;

/// Unmodified layers of candle_nn on a ParamStore.
mod layers;

/// The layout of buckets, as properties.
mod buckets;

/// All ranks hold the same model: start values, differences between ranks, VarMapSync.
mod replicas;

/// DistributedDataParallel on probe parameters: values after a step, calls out of order.
mod ddp;

/// Clipping by the global norm.
mod clipping;

/// Several micro-batches per step, and the guard around them.
mod accumulation;

/// Buckets are reduced while backward runs, and that changes no bits.
mod overlap;

/// W ranks compute what single-process candle computes on the joined batch.
mod parity;

/// Optimizers against PyTorch, parameter groups, settings out of range.
mod optim;

/// Which samples each rank sees, against PyTorch; exact means.
mod sampler;

/// The ledger against the heap, measured by a counting allocator.
mod memory;
