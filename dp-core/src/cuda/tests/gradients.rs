use super::super::args::GradientArgs;
use super::super::sources::Kernel;
use super::slices::{LENGTHS, Memory, awkward, narrowed, ordinary, rng};
use super::{Emulation, for_floats, kernels_or_skip};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::mean_gradient::MeanGradient;
use crate::norm::{GradNorm, NormBuffers, global_norm, l2_norm, sum_of_limbs};
use crate::precision::Trainable;

/// Both norms of two parts, by kernels.
fn norms<G: Trainable>(kernels: &Emulation, parts: [&[G]; 2], divisor: f32) -> (f32, f64) {
    let mut max = Memory::new(&[0f32], 0);
    let mut limbs = Memory::new(&[0i64; 4], 0);
    for name in ["max_abs", "sum_of_squares"] {
        for (start, part) in parts.into_iter().enumerate() {
            let mut grad = Memory::new(part, start);
            let args = GradientArgs {
                grad: grad.address(),
                len: part.len() as u64,
                max: max.address(),
                limbs: limbs.address(),
                not_finite: 0,
                divisor,
            };
            // SAFETY: `grad` has `len` elements, `max` one, `limbs` four.
            unsafe { kernels.launch(Kernel::of(name, G::DTYPE), &args) };
        }
    }
    let max = max.get()[0];
    (max, l2_norm(max, sum_of_limbs(limbs.get())))
}

fn check_norms<G: Trainable>(values: &[f32], divisor: f32) -> Result<()> {
    let kernels = kernels_or_skip!();
    let values: Vec<G> = narrowed(values);
    let len = values.len();
    let (max, l2) = norms(kernels, [&values[..len / 3], &values[len / 3..]], divisor);

    let buffer = Buffer::from_vec(values);
    let gradient = MeanGradient::new(&buffer, 0..len, divisor);
    for (kind, got) in [(GradNorm::Inf, f64::from(max)), (GradNorm::L2, l2)] {
        let expected = global_norm(kind, &|f| f(&gradient), None, &mut NormBuffers::default())?;
        let same = got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
        let dtype = G::DTYPE;
        assert!(
            same,
            "{kind:?} of {len} {dtype:?} over {divisor}: {got:e}, the host's is {expected:e}"
        );
    }
    Ok(())
}

#[test]
fn norms_are_the_hosts() -> Result<()> {
    for len in LENGTHS {
        for divisor in [1.0, 3.7] {
            let mut rng = rng(len as u64);
            for_floats!(check_norms(&ordinary(&mut rng, len), divisor));
            for_floats!(check_norms(&awkward(&mut rng, len), divisor));
            // All sizes, but finite: small ones are cut off.
            let mut finite = awkward(&mut rng, len);
            finite.retain(|x| x.abs() < 1e4);
            for_floats!(check_norms(&finite, divisor));
        }
    }
    let tiny: Vec<f32> = (0..100).map(f32::from_bits).collect();
    check_norms::<f32>(&tiny, 1.0)?;
    check_norms::<f32>(&[f32::MAX; 50], 1.0)?;
    check_norms::<f32>(&[f32::INFINITY, 1.0, f32::NAN], 1.0)?;
    check_norms::<f32>(&[0.0, -0.0, -f32::INFINITY], 1.0)
}

/// A kernel is asked for a norm that the host knows by heart.
#[test]
fn three_four_five() -> Result<()> {
    let kernels = kernels_or_skip!();
    assert_eq!(norms::<f32>(kernels, [&[3.0], &[-4.0]], 1.0), (4.0, 5.0));
    assert_eq!(norms::<f32>(kernels, [&[3.0], &[-4.0]], 2.0), (2.0, 2.5));
    Ok(())
}

fn check_finite<G: Trainable>(values: &[f32], divisor: f32) -> Result<()> {
    let kernels = kernels_or_skip!();
    let values: Vec<G> = narrowed(values);
    let mut grad = Memory::new(&values, 3);
    let mut flag = Memory::new(&[0u32], 0);
    let args = GradientArgs {
        grad: grad.address(),
        len: values.len() as u64,
        max: 0,
        limbs: 0,
        not_finite: flag.address(),
        divisor,
    };
    // SAFETY: `grad` has `len` elements, the flag one.
    unsafe { kernels.launch(Kernel::of("find_non_finite", G::DTYPE), &args) };
    let buffer = Buffer::from_vec(values);
    let gradient = MeanGradient::new(&buffer, 0..buffer.len(), divisor);
    let mut finite = true;
    gradient.for_each_chunk(gradient.range(), |_, part| {
        finite &= part.iter().all(|g| g.is_finite());
    })?;
    assert_eq!(
        flag.get()[0] == 0,
        finite,
        "{} {:?}",
        buffer.len(),
        G::DTYPE
    );
    Ok(())
}

#[test]
fn non_finite_gradients_are_found() -> Result<()> {
    for len in LENGTHS {
        let mut rng = rng(len as u64);
        let mut values = ordinary(&mut rng, len);
        for_floats!(check_finite(&values, 0.5));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            if let Some(last) = values.last_mut() {
                *last = bad;
            }
            for_floats!(check_finite(&values, 0.5));
        }
    }
    // The division may overflow.
    check_finite::<f32>(&[1.0, 3e38], 0.5)
}
