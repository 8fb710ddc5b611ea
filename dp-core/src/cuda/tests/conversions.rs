use candle_core::{Device, Tensor, WithDType};
use half::{bf16, f16};

use super::super::args::ConvertArgs;
use super::super::sources::Kernel;
use super::slices::{LENGTHS, Memory, assert_same, awkward, narrowed, ordinary, rng};
use super::{for_float_pairs, kernels_or_skip};
use crate::buffer::{Buffer, Element};
use crate::error::Result;
use crate::param_flags::ParamFlags;
use crate::precision::{Trainable, convert, read_gradient};

fn gradients_into_buckets<G: Trainable + WithDType, T: Trainable>() -> Result<()> {
    let kernels = kernels_or_skip!();
    let mut found = [0, 0];
    for (case, len) in LENGTHS.into_iter().enumerate() {
        for factor in [1.0, 0.37, -3.0] {
            for (accumulate, plain) in [(false, false), (true, false), (true, true)] {
                let mut rng = rng((case * 10) as u64);
                let numbers = if plain { ordinary } else { awkward };
                let grads: Vec<G> = narrowed(&numbers(&mut rng, len));
                let before: Vec<T> = narrowed(&numbers(&mut rng, len));
                let mut from = Memory::new(&grads, case % 5);
                let mut to = Memory::new(&before, (case + 2) % 5);
                let mut flag = Memory::new(&[0u32], 0);
                let args = ConvertArgs {
                    from: from.address(),
                    to: to.address(),
                    not_finite: flag.address(),
                    len: len as u64,
                    factor,
                    accumulate: u32::from(accumulate),
                };
                let kernel = Kernel::of_pair("convert", <G as Element>::DTYPE, T::DTYPE);
                // SAFETY: both slices have `len` elements, the flag one.
                unsafe { kernels.launch(kernel, &args) };

                let grad = Tensor::from_vec(grads, len, &Device::Cpu)?;
                let mut out = Buffer::from_vec(before);
                let mut flags = ParamFlags::new(1, &Device::Cpu)?;
                let watch = Some((&mut flags, 0));
                read_gradient(&grad, &mut out, 0..len, factor, accumulate, watch)?;
                let finite = !flags.read()?[0];
                let what = format!("factor {factor}, accumulate {accumulate}");
                assert_same(to.get(), out.as_slice::<T>()?, &what);
                assert_eq!(flag.get()[0] == 0, finite, "{what}, {len} elements");
                found[usize::from(finite)] += 1;
            }
        }
    }
    assert!(found.iter().all(|n| *n > 0), "finite and not: {found:?}");
    Ok(())
}

#[test]
fn gradients() -> Result<()> {
    for_float_pairs!(gradients_into_buckets());
    Ok(())
}

/// To the bit, NaN included: conversions are no arithmetic.
fn exactly<F: Trainable, T: Trainable>(values: &[F]) -> Result<()> {
    let kernels = kernels_or_skip!();
    let mut from = Memory::new(values, 0);
    let mut to = Memory::new(&vec![T::ZERO; values.len()], 1);
    let args = ConvertArgs {
        from: from.address(),
        to: to.address(),
        not_finite: 0,
        len: values.len() as u64,
        factor: 1.0,
        accumulate: 0,
    };
    // SAFETY: both slices have the length of `values`.
    unsafe { kernels.launch(Kernel::of_pair("convert", F::DTYPE, T::DTYPE), &args) };
    let mut expected = vec![T::ZERO; values.len()];
    convert(values, &mut expected);
    let bytes = |values: &[T]| {
        let mut bytes = vec![0; size_of_val(values)];
        T::to_le(values, &mut bytes);
        bytes
    };
    assert!(
        bytes(to.get()) == bytes(&expected),
        "{:?} to {:?}",
        F::DTYPE,
        T::DTYPE
    );
    Ok(())
}

#[test]
fn all_16_bit_numbers_widen() -> Result<()> {
    let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    exactly::<f16, f32>(&halves)?;
    let halves: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    exactly::<bf16, f32>(&halves)
}

/// Each 16-bit number, halfway to the next one, and their neighbours: where rounding changes.
#[test]
fn all_roundings() -> Result<()> {
    fn around(to_f32: impl Fn(u16) -> f32) -> Vec<f32> {
        let around = |bits| {
            let (this, next) = (to_f32(bits), to_f32(bits.wrapping_add(1)));
            let halfway = this + (next - this) / 2.0;
            [this, halfway]
                .map(|x| [-1, 0, 1].map(|d| f32::from_bits(x.to_bits().wrapping_add_signed(d))))
        };
        (0..=u16::MAX).flat_map(around).flatten().collect()
    }
    exactly::<f32, f16>(&around(|bits| f16::from_bits(bits).to_f32()))?;
    exactly::<f32, bf16>(&around(|bits| bf16::from_bits(bits).to_f32()))
}
