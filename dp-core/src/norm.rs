//! The gradient norm, exact in any order.
//!
//! A sum of floats depends on the order of its terms, so a global norm usually differs in the last bits between world
//! sizes, stages and bucket caps. Here the squares are added as integers, which is associative: with `m` the greatest
//! absolute value and `2^e > m` the next power of two, each `(g / 2^e)^2` lies in `[0, 1)`, is exact in f64, and is
//! cut off to a multiple of `2^-62`. Cutting off loses less than `n 2^-62` of a sum that is at least 1/4, for `n`
//! elements: far below the rounding of the result.

#[cfg(feature = "cuda")]
mod cuda;

use std::sync::{Arc, LazyLock};

use crate::buffer::Buffer;
use crate::comm::{Collective, Communicator, ReduceOp, Request};
use crate::error::Result;
use crate::mean_gradient::MeanGradient;

/// A norm over all elements of all gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum GradNorm {
    /// `sqrt(sum of g^2)`
    #[default]
    L2,
    /// `max |g|`
    Inf,
}

/// Calls its argument with one part of a gradient after the other.
pub(crate) type ForEachPart<'a> =
    &'a dyn Fn(&mut dyn FnMut(&MeanGradient<'_>) -> Result<()>) -> Result<()>;

/// What ranks send each other for a norm, kept from one to the next.
#[derive(Debug, Default)]
pub(crate) struct NormBuffers {
    max: Option<Buffer>,
    limbs: Option<Buffer>,
}

/// The norm over the gradients of all ranks that `comm` joins; of this rank's only without one. NaN if an element is NaN, else
/// infinity if one is infinite.
pub(crate) fn global_norm(
    kind: GradNorm,
    for_each_part: ForEachPart<'_>,
    comm: Option<&dyn Communicator>,
    buffers: &mut NormBuffers,
) -> Result<f64> {
    let mut max = 0f32;
    #[cfg(feature = "cuda")]
    let mut on_device = None;
    for_each_part(&mut |part| {
        #[cfg(feature = "cuda")]
        if part.is_cuda() {
            return cuda::max_abs(&mut on_device, part);
        }
        part.for_each_chunk(part.range(), |_, values| max = max_abs(max, values))
    })?;
    #[cfg(feature = "cuda")]
    if let Some(sums) = &on_device {
        max = sums.max()?;
    }
    if let Some(comm) = comm {
        static LABEL: LazyLock<Arc<str>> = LazyLock::new(|| "greatest gradient".into());
        let label = Arc::clone(&LABEL);
        let request = Request::new(Collective::AllReduce(ReduceOp::Max), label);
        let mut buffer = match buffers.max.take() {
            Some(buffer) => buffer,
            None => Buffer::from_vec(vec![0f32]),
        };
        buffer.as_mut_slice()?[0] = max;
        let buffer = buffers.max.insert(comm.start(request, buffer)?.wait()?);
        max = buffer.as_slice::<f32>()?[0];
    }
    if kind == GradNorm::Inf {
        return Ok(f64::from(max));
    }
    let exponent = if max.is_finite() {
        exponent_above(max)
    } else {
        0
    };
    let mut sum = 0u128;
    #[cfg(feature = "cuda")]
    if let Some(sums) = &mut on_device {
        sums.set_max(max)?;
    }
    for_each_part(&mut |part| {
        #[cfg(feature = "cuda")]
        if let Some(sums) = &mut on_device {
            return sums.add_squares(part);
        }
        part.for_each_chunk(part.range(), |_, values| {
            sum += sum_of_squares(values, exponent)
        })
    })?;
    #[cfg(feature = "cuda")]
    if let Some(sums) = &on_device {
        sum = sums.squares()?;
    }
    if let Some(comm) = comm {
        // Four limbs of 32 bits: their sums over any number of ranks fit in i64.
        static LABEL: LazyLock<Arc<str>> = LazyLock::new(|| "squared gradient norm".into());
        let label = Arc::clone(&LABEL);
        let request = Request::new(Collective::AllReduce(ReduceOp::Sum), label);
        let mut limbs = match buffers.limbs.take() {
            Some(buffer) => buffer,
            None => Buffer::from_vec(vec![0i64; 4]),
        };
        for (i, limb) in limbs.as_mut_slice::<i64>()?.iter_mut().enumerate() {
            *limb = i64::from((sum >> (32 * i)) as u32);
        }
        let limbs = buffers.limbs.insert(comm.start(request, limbs)?.wait()?);
        sum = sum_of_limbs(limbs.as_slice()?);
    }
    Ok(l2_norm(max, sum))
}

/// The L2 norm of elements whose greatest absolute value is `max` and whose scaled squares add up to `sum`.
pub(crate) fn l2_norm(max: f32, sum: u128) -> f64 {
    if !max.is_finite() {
        return f64::from(max);
    }
    (sum as f64 * 2f64.powi(-62)).sqrt() * 2f64.powi(exponent_above(max))
}

/// The number whose limbs of 32 bits these are. Limbs may be sums, and exceed 32 bits.
pub(crate) fn sum_of_limbs(limbs: &[i64]) -> u128 {
    let limbs = limbs.iter().enumerate();
    limbs.map(|(i, limb)| (*limb as u128) << (32 * i)).sum()
}

/// The factor by which gradients of `norm` are multiplied, so that the norm becomes at most `max_norm`:
/// `min(1, max_norm / (norm + 1e-6))`, as in `torch.nn.utils.clip_grad_norm_`. NaN for a NaN norm.
pub(crate) fn clip_factor(norm: f64, max_norm: f64) -> f32 {
    let factor = max_norm / (norm + 1e-6);
    if factor > 1.0 { 1.0 } else { factor as f32 }
}

/// The greater of `start` and all `|x|`; NaN if any is NaN.
fn max_abs(start: f32, slice: &[f32]) -> f32 {
    slice.iter().fold(start, |m, x| {
        let x = x.abs();
        if m.is_nan() || m > x { m } else { x }
    })
}

/// The least `e` with `x < 2^e`, for finite `x >= 0`; 0 for 0.
fn exponent_above(x: f32) -> i32 {
    if x == 0.0 {
        return 0;
    }
    // Every f32, also a subnormal one, is a normal f64.
    ((f64::from(x).to_bits() >> 52) & 0x7ff) as i32 - 1022
}

fn sum_of_squares(slice: &[f32], exponent: i32) -> u128 {
    let scale = 2f64.powi(-exponent);
    let mut sum = 0u128;
    // Halves of 2^16 squares fit in u64 with room to spare.
    for block in slice.chunks(1 << 16) {
        let (mut high, mut low) = (0u64, 0u64);
        for x in block {
            let x = f64::from(*x) * scale;
            let square = (x * x * 2f64.powi(62)) as u64;
            high += square >> 32;
            low += square & 0xffff_ffff;
        }
        sum += (u128::from(high) << 32) + u128::from(low);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn norm(slices: &[&[f32]]) -> f64 {
        let parts: ForEachPart<'_> = &|f| {
            let mut buffers = slices.iter().map(|s| Buffer::from_vec(s.to_vec()));
            buffers.try_for_each(|b| f(&MeanGradient::new(&b, 0..b.len(), 1.0)))
        };
        global_norm(GradNorm::L2, parts, None, &mut NormBuffers::default()).unwrap_or(f64::NAN)
    }

    #[test]
    fn known_values() {
        assert_eq!(norm(&[&[3.0], &[4.0]]), 5.0);
        assert_eq!(norm(&[&[]]), 0.0);
        assert_eq!(norm(&[&[0.0, -0.0]]), 0.0);
        assert_eq!(norm(&[&[-1.0]]), 1.0);
        let tiny = f32::from_bits(1);
        assert_eq!(norm(&[&[tiny]]), f64::from(tiny));
        let huge = norm(&[&[f32::MAX, f32::MAX]]);
        assert!((huge / (f64::from(f32::MAX) * 2f64.sqrt()) - 1.0).abs() < 1e-15);
        assert_eq!(norm(&[&[f32::NEG_INFINITY, 1.0]]), f64::INFINITY);
        assert!(norm(&[&[f32::INFINITY, f32::NAN]]).is_nan());
        assert!(norm(&[&[f32::NAN, f32::INFINITY]]).is_nan());
    }

    #[test]
    fn order_and_grouping_do_not_change_a_bit() {
        let mut x: Vec<f32> = (0..10_000)
            .map(|i| ((i * 7919) as f32).sin() * 1e-3)
            .collect();
        x[17] = 1e4;
        let whole = norm(&[&x]);
        let (a, b) = x.split_at(3_333);
        assert_eq!(whole.to_bits(), norm(&[b, a]).to_bits());
        let exact = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        assert!((whole / exact - 1.0).abs() < 1e-12);
    }

    #[test]
    fn clipping_follows_pytorch() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(5.0, 1.0), (1.0 / 5.000001f64) as f32);
        assert!(clip_factor(f64::NAN, 1.0).is_nan());
        assert_eq!(clip_factor(f64::INFINITY, 1.0), 0.0);
    }
}
