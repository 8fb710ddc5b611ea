use super::super::args::{AdamWArgs, Flat, SgdArgs};
use super::super::sources::Kernel;
use super::slices::{LENGTHS, Memory, assert_same, awkward, narrowed, ordinary, rng};
use super::{Emulation, for_float_pairs, kernels_or_skip};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::mean_gradient::MeanGradient;
use crate::optim::{AdamW, FusedOptimizer, Optimizer, Sgd};
use crate::precision::{Trainable, narrow};

/// One update by the optimizer's kernel.
///
/// # Safety
/// As `Emulation::launch`.
unsafe fn launch<G: Trainable, P: Trainable>(
    kernels: &Emulation,
    optimizer: &impl Optimizer,
    step: u64,
    scale: f32,
    flat: Flat,
) {
    let of = |name| Kernel::of_pair(name, G::DTYPE, P::DTYPE);
    match optimizer.fused().expect("an optimizer with a kernel") {
        FusedOptimizer::AdamW(adamw) => {
            let factors = adamw.factors(step, scale);
            // SAFETY: the caller's promise.
            unsafe { kernels.launch(of("adamw"), &AdamWArgs { flat, factors }) };
        }
        FusedOptimizer::Sgd(sgd) => {
            let factors = sgd.factors(step, scale);
            // SAFETY: the caller's promise.
            unsafe { kernels.launch(of("sgd"), &SgdArgs { flat, factors }) };
        }
    }
}

/// Three steps of `optimizer`, on the host and by the kernel. The first two have ordinary gradients; the last one has all
/// that can go wrong, clipping and a divisor.
fn three_steps<G: Trainable, P: Trainable>(optimizer: &impl Optimizer) -> Result<()> {
    let kernels = kernels_or_skip!();
    let is_16_bit = P::DTYPE.size_in_bytes() == 2;
    for (case, len) in LENGTHS.into_iter().enumerate() {
        let mut rng = rng(len as u64);
        let start = |slice: usize| (case + slice) % 5;
        let mut values = ordinary(&mut rng, len);
        let mut state = [vec![0f32; len], vec![0f32; len]];
        let mut parameters = vec![P::ZERO; len];
        let mut of_kernel = Memory::new(&values, start(0));
        let mut rounded = Memory::new(&parameters, start(1));
        let mut states = [Memory::new(&state[0], start(2)), Memory::new(&state[1], 0)];
        for (step, divisor, scale) in [(1, 1.0, 1.0), (2, 4.0, 1.0), (3, 3.7, 0.3)] {
            let grads = match step {
                3 => awkward(&mut rng, len),
                _ => ordinary(&mut rng, len),
            };
            let grads: Vec<G> = narrowed(&grads);
            let mut grad = Memory::new(&grads, start(3));
            let flat = Flat {
                values: of_kernel.address(),
                rounded: if is_16_bit { rounded.address() } else { 0 },
                grad: grad.address(),
                state: [states[0].address(), states[1].address()],
                len: len as u64,
                divisor,
            };
            // SAFETY: all slices have `len` elements.
            unsafe { launch::<G, P>(kernels, optimizer, step, scale, flat) };

            let buffer = Buffer::from_vec(grads);
            let gradient = MeanGradient::new(&buffer, 0..len, divisor);
            gradient.for_each_chunk(gradient.range(), |at, grad| {
                let [a, b] = &mut state;
                let state = &mut [&mut a[at.clone()], &mut b[at.clone()]];
                optimizer.update(step, &mut values[at], grad, scale, state);
            })?;
            narrow(&values, &mut parameters);
            let what = format!("step {step} of {optimizer:?}");
            assert_same(of_kernel.get(), &values, &what);
            assert_same(states[0].get(), &state[0], &what);
            assert_same(states[1].get(), &state[1], &what);
            if is_16_bit {
                assert_same(rounded.get(), &parameters, &what);
            }
        }
    }
    Ok(())
}

#[test]
fn adamw() -> Result<()> {
    for_float_pairs!(three_steps(&AdamW::default()));
    let other = AdamW {
        lr: 0.1,
        beta1: 0.5,
        beta2: 0.95,
        eps: 1e-3,
        weight_decay: 0.0,
    };
    three_steps::<f32, f32>(&other)
}

#[test]
fn sgd() -> Result<()> {
    for_float_pairs!(three_steps(&Sgd::new(0.1)));
    let momentum = Sgd {
        momentum: 0.9,
        dampening: 0.25,
        weight_decay: 0.01,
        ..Sgd::new(0.1)
    };
    for_float_pairs!(three_steps(&momentum));
    let nesterov = Sgd {
        nesterov: true,
        dampening: 0.0,
        ..momentum
    };
    for_float_pairs!(three_steps(&nesterov));
    let decay = Sgd {
        weight_decay: 0.3,
        ..Sgd::new(0.1)
    };
    three_steps::<f32, f32>(&decay)
}

/// Two groups of parameters in one bucket: each launch updates its segment alone.
#[test]
fn segments_of_a_bucket() -> Result<()> {
    let kernels = kernels_or_skip!();
    let mut rng = rng(7);
    let (values, grads) = (ordinary(&mut rng, 1000), ordinary(&mut rng, 1000));
    let groups = [
        (0..333, AdamW::with_lr(0.1)),
        (
            333..1000,
            AdamW {
                weight_decay: 0.0,
                ..AdamW::default()
            },
        ),
    ];
    let zeros = vec![0f32; 1000];
    let [mut of_kernel, mut m, mut v] = [&values, &zeros, &zeros].map(|x| Memory::new(x, 1));
    let mut grad = Memory::new(&grads, 2);
    let (mut expected, mut state) = (values, [zeros.clone(), zeros]);
    for (range, adamw) in groups {
        let at = |slice: u64| slice + 4 * range.start as u64;
        let flat = Flat {
            values: at(of_kernel.address()),
            rounded: 0,
            grad: at(grad.address()),
            state: [at(m.address()), at(v.address())],
            len: range.len() as u64,
            divisor: 1.0,
        };
        // SAFETY: the range is inside all slices.
        unsafe { launch::<f32, f32>(kernels, &adamw, 5, 1.0, flat) };
        let [a, b] = &mut state;
        let state = &mut [&mut a[range.clone()], &mut b[range.clone()]];
        adamw.update(
            5,
            &mut expected[range.clone()],
            &grads[range.clone()],
            1.0,
            state,
        );
    }
    assert_same(of_kernel.get(), &expected, "values");
    assert_same(m.get(), &state[0], "first moments");
    assert_same(v.get(), &state[1], "second moments");
    Ok(())
}
