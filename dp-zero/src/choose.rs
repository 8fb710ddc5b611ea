//! A trainer that is chosen while the program runs.

use std::sync::Arc;

use dp_core::{
    Communicator, DistributedDataParallel, EngineConfig, Error, Optimizer, ParamGroups, ParamStore,
    Result, Trainer,
};

use crate::{Sharding, ZeroConfig, ZeroOptimizer, ZeroStage};

/// The trainer for `sharding`, e.g. from the command line. Collective, as the trainers' own constructors are.
///
/// # Errors
/// Theirs; [`Error::InvalidArgument`] for [`Sharding::Zero3`], which has no trainer.
pub fn trainer<O: Optimizer>(
    sharding: Sharding,
    store: ParamStore,
    comm: Arc<dyn Communicator>,
    optimizer: impl Into<ParamGroups<O>>,
    engine: EngineConfig,
) -> Result<Box<dyn Trainer<Optimizer = O>>> {
    let stage = match sharding {
        Sharding::Ddp => {
            let ddp = DistributedDataParallel::with_config(store, comm, optimizer, engine)?;
            return Ok(Box::new(ddp));
        }
        Sharding::Zero1 => ZeroStage::One,
        Sharding::Zero2 => ZeroStage::Two,
        Sharding::Zero3 => {
            return Err(Error::invalid(
                "sharding",
                "zero3 is estimated only, there is no trainer for it",
            ));
        }
    };
    let config = ZeroConfig::stage(stage).with_engine(engine);
    let zero = ZeroOptimizer::new(store, comm, optimizer, config)?;
    Ok(Box::new(zero))
}
