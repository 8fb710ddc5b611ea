use super::super::args::MasterArgs;
use super::super::sources::Kernel;
use super::slices::{LENGTHS, Memory, assert_same, awkward, narrowed, rng};
use super::{for_floats, kernels_or_skip};
use crate::error::Result;
use crate::masters::{are_rounded, refresh_altered};
use crate::precision::Trainable;

/// Parameters that are their masters rounded, but for the elements `altered`.
fn check<P: Trainable>(len: usize, altered: &[usize]) -> Result<()> {
    let kernels = kernels_or_skip!();
    let mut masters = awkward(&mut rng(len as u64), len);
    let mut values: Vec<P> = narrowed(&masters);
    // A NaN with other bits is no other value.
    for value in values.iter_mut().filter(|v| v.to_acc().is_nan()) {
        *value = P::from_acc(-value.to_acc());
    }
    for i in altered.iter().filter(|i| **i < len) {
        values[*i] = P::from_acc(values[*i].to_acc() + 1.0);
    }
    let mut of_kernel = Memory::new(&masters, 1);
    let mut of_values = Memory::new(&values, 2);
    let mut flag = Memory::new(&[0u32], 0);
    let args = MasterArgs {
        masters: of_kernel.address(),
        values: of_values.address(),
        altered: flag.address(),
        len: len as u64,
    };
    // SAFETY: both slices have `len` elements, the flag one.
    unsafe { kernels.launch(Kernel::of("find_altered", P::DTYPE), &args) };
    let what = format!("{len} {:?}, altered {altered:?}", P::DTYPE);
    assert_eq!(flag.get()[0] == 0, are_rounded(&masters, &values), "{what}");
    // SAFETY: as above.
    unsafe { kernels.launch(Kernel::of("refresh_altered", P::DTYPE), &args) };
    refresh_altered(&mut masters, &values);
    assert_same(of_kernel.get(), &masters, &what);
    Ok(())
}

#[test]
fn altered_parameters_are_found_and_their_masters_refreshed() -> Result<()> {
    for len in LENGTHS {
        for_floats!(check(len, &[]));
        for_floats!(check(len, &[0]));
        for_floats!(check(len, &[len.saturating_sub(1)]));
        for_floats!(check(len, &[17, 18, 900]));
    }
    Ok(())
}
