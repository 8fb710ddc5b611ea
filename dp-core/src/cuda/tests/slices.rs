//! Awkward slices: lengths, alignments, numbers.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::buffer::Element;

/// Nothing, one, around a warp, and several turns of the emulated grid with a rest.
pub(super) const LENGTHS: [usize; 6] = [0, 1, 31, 33, 1000, 4097];

pub(super) fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Numbers of all sizes, and now and then a zero, a subnormal, an infinity or a NaN.
pub(super) fn awkward(rng: &mut ChaCha8Rng, len: usize) -> Vec<f32> {
    let special = [
        0.0,
        -0.0,
        f32::from_bits(1),
        -f32::from_bits(0x7f_ffff),
        f32::MIN_POSITIVE,
        f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        65519.9,
        65520.0,
        6e-8,
    ];
    let number = |_| match rng.random_range(0..20u32) {
        0 => special[rng.random_range(0..special.len())],
        1..=3 => f32::from_bits(rng.random::<u32>()),
        _ => numbers_of(rng),
    };
    (0..len).map(number).collect()
}

/// Finite numbers about 1, of both signs.
pub(super) fn ordinary(rng: &mut ChaCha8Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| numbers_of(rng)).collect()
}

fn numbers_of(rng: &mut ChaCha8Rng) -> f32 {
    let (x, e) = (rng.random_range(-1.0..1.0f32), rng.random_range(-12..4));
    x * 2f32.powi(e)
}

pub(super) fn narrowed<T: Element<Acc = f32>>(values: &[f32]) -> Vec<T> {
    values.iter().map(|x| T::from_acc(*x)).collect()
}

/// A slice that begins anywhere in its memory, with neighbours that nobody may touch.
pub(super) struct Memory<T> {
    elements: Vec<T>,
    start: usize,
    len: usize,
}

const MARGIN: usize = 5;

impl<T: Element> Memory<T> {
    /// A copy of `values`, `start` elements (at most 4) after an address that vectors could begin at.
    pub fn new(values: &[T], start: usize) -> Self {
        let mut elements = vec![T::ZERO; values.len() + 2 * MARGIN + start];
        let aligned = elements.as_ptr().align_offset(4 * size_of::<T>());
        let start = start + aligned.min(MARGIN);
        elements[start..start + values.len()].copy_from_slice(values);
        Self {
            elements,
            start,
            len: values.len(),
        }
    }

    pub fn address(&mut self) -> u64 {
        self.elements[self.start..].as_mut_ptr() as u64
    }

    pub fn get(&self) -> &[T] {
        let (before, rest) = self.elements.split_at(self.start);
        let (values, after) = rest.split_at(self.len);
        for neighbours in [before, after] {
            let mut bytes = vec![0; size_of_val(neighbours)];
            T::to_le(neighbours, &mut bytes);
            assert!(bytes.iter().all(|b| *b == 0), "neighbours are written");
        }
        values
    }
}

/// The same bits; a NaN is a NaN, since CUDA does not keep its sign and payload.
#[track_caller]
pub(super) fn assert_same<T: Element<Acc = f32>>(got: &[T], expected: &[T], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let (g, e) = (g.to_acc(), e.to_acc());
        let same = g.to_bits() == e.to_bits() || (g.is_nan() && e.is_nan());
        assert!(
            same,
            "{what}: element {i} of {} is {g:e}, the host's is {e:e}",
            got.len()
        );
    }
}
