//! What the program itself writes to parameters: through the trainer, so that masters follow; and whether it has done so
//! otherwise.

use std::sync::{Arc, LazyLock};

use candle_core::{DType, Device, Tensor};

use crate::buffer::{Buffer, with_element};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::non_finite::first_over_ranks;
use crate::optim::Optimizer;
use crate::param::{ParamKind, with_values};
use crate::param_flags::ParamFlags;
use crate::replica::broadcast_values;

static ALTERED: LazyLock<Arc<str>> =
    LazyLock::new(|| "parameters changed since clip_grad_norm".into());

impl<O: Optimizer> Engine<O> {
    pub(crate) fn refresh_masters(&mut self) -> Result<()> {
        self.require_whole("refresh_masters")?;
        let trained = |i: &usize| self.params[*i].kind() == ParamKind::Trained;
        let order = self.order.iter().copied().filter(trained);
        let outcome =
            broadcast_values(&self.params, order, self.comm.as_ref(), self.store.ledger());
        self.reducer.remember_failure(outcome)?;
        let (layout, params) = (&self.layout, &self.params);
        self.masters.refresh_altered(layout, params, &self.owned)?;
        self.mark_update()
    }

    pub(crate) fn set_parameter(&mut self, name: &str, values: &Tensor) -> Result<()> {
        self.require_empty_window("set_parameter")?;
        let checked = self.values_for(name, values);
        let mine = checked.as_ref().err().map(ToString::to_string);
        let all = self
            .comm
            .all_gather_object::<Option<String>>(&mine, &format!("set_parameter {name}"));
        let all = self.reducer.remember_failure(all)?;
        if let Some((rank, message)) = (0..).zip(all).find_map(|(r, m)| Some((r, m?))) {
            let own = checked.err().filter(|_| rank == self.comm.rank());
            return Err(own.unwrap_or_else(|| {
                Error::invalid("set_parameter", format!("on rank {rank}: {message}"))
            }));
        }
        let (position, buffer) = checked?;
        let param = &self.params[position];
        param.copy_from(0..param.num_elements(), &buffer, 0)?;
        let (params, comm) = (&self.params, self.comm.as_ref());
        let outcome = broadcast_values(params, [position], comm, self.store.ledger());
        self.reducer.remember_failure(outcome)?;
        self.masters
            .refresh(&self.layout, params, &self.owned, |i| i == position)?;
        self.mark_update()
    }

    /// The position of the parameter `name`, and `values` in its dtype.
    fn values_for(&self, name: &str, values: &Tensor) -> Result<(usize, Buffer)> {
        let position = self.params.iter().position(|p| p.name() == name);
        let position = position
            .ok_or_else(|| Error::parameter(name, "the model has no parameter of this name"))?;
        let own = self.params[position].tensor();
        if values.shape() != own.shape() {
            let (got, expected) = (values.shape(), own.shape());
            let message = format!("values of shape {got:?}, expected {expected:?}");
            return Err(Error::parameter(name, message));
        }
        let given = values.to_device(&Device::Cpu)?;
        let values = given.to_dtype(own.dtype())?.flatten_all()?.contiguous()?;
        let num_finite = |t: &Tensor| -> candle_core::Result<usize> {
            let t = t.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            Ok(t.iter().filter(|x| x.is_finite()).count())
        };
        if num_finite(&given)? != num_finite(&values)? {
            let message = format!("a value is out of the range of {}", own.dtype().as_str());
            return Err(Error::parameter(name, message));
        }
        let buffer = with_element!(own.dtype(), T => {
            with_values::<T, _>(&values, |values| Buffer::from_vec(values.to_vec()))?
        });
        Ok((position, buffer))
    }

    /// Fails if a parameter that this rank owns a part of is not its master rounded.
    pub(crate) fn check_masters(&self) -> Result<()> {
        let (layout, params, owned) = (&self.layout, &self.params, &self.owned);
        let mut flags = ParamFlags::new(params.len(), self.store.device())?;
        self.masters
            .find_altered(layout, params, owned, &mut flags)?;
        match first_in_order(&self.order, flags.read()?) {
            Some(position) => Err(self.altered(position)),
            None => Ok(()),
        }
    }

    /// [`check_masters`](Self::check_masters), on all ranks alike.
    pub(crate) fn check_masters_on_all_ranks(&mut self) -> Result<()> {
        if self.masters.is_empty() {
            return Ok(());
        }
        let (layout, params, owned) = (&self.layout, &self.params, &self.owned);
        let flags = &mut self.scratch.flags;
        flags.clear()?;
        self.masters.find_altered(layout, params, owned, flags)?;
        let mine = first_in_order(&self.order, flags.read()?);
        let buffer = &mut self.scratch.first_of_rank;
        match first_over_ranks(mine, &ALTERED, self.comm.as_ref(), buffer)? {
            Some((position, _)) => Err(self.altered(position)),
            None => Ok(()),
        }
    }

    fn altered(&self, position: usize) -> Error {
        Error::Altered {
            parameter: self.params[self.order[position]].name().to_string(),
        }
    }
}

/// The first position, in the order that ranks share, of a parameter whose flag is raised.
fn first_in_order(order: &[usize], raised: &[bool]) -> Option<usize> {
    order.iter().position(|i| raised[*i])
}
