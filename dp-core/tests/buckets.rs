use candle_core::{DType, Device};
use dp_core::{BucketCaps, BucketLayout, GradAccumDType, Param, ParamSpec, ParamStore, Result};
use proptest::prelude::*;

use crate::support::{expect_error, ones};

/// Parameters `p0, p1, ...` of these sizes; the flagged ones are frozen.
fn params(sizes: &[(usize, bool)]) -> Result<Vec<Param>> {
    let frozen: Vec<String> = (0..sizes.len())
        .filter(|i| sizes[*i].1)
        .map(|i| format!("p{i}"))
        .collect();
    let store = ParamStore::new(&Device::Cpu).with_frozen(move |n| frozen.iter().any(|f| f == n));
    for (i, (size, _)) in sizes.iter().enumerate() {
        ones(&store.var_builder(DType::F32), *size, &format!("p{i}"))?;
    }
    Ok(store.params())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_layout_is_sound(
        sizes in prop::collection::vec((0usize..40, prop::bool::weighted(0.2)), 0..12),
        first in 1usize..100,
        rest in 1usize..200,
        world_size in 1usize..9,
    ) {
        let params = params(&sizes).expect("new names");
        let order: Vec<usize> = (0..params.len()).collect();
        let caps = BucketCaps::with_first(4 * first, 4 * rest).expect("positive");
        let layout = BucketLayout::new(&ParamSpec::of_all(&params), &order, caps, GradAccumDType::F32, world_size);

        // Trained parameters in reverse creation order.
        let in_order: Vec<usize> = layout.buckets().iter().flat_map(|b| &b.slots).map(|s| s.param_idx).collect();
        let expected: Vec<usize> = order.iter().rev().copied().filter(|i| !sizes[*i].1).collect();
        prop_assert_eq!(in_order, expected);
        for i in order {
            let place = layout.place(i);
            prop_assert_eq!(place.is_none(), sizes[i].1);
            if let Some((bucket, slot)) = place {
                prop_assert_eq!(layout.buckets()[bucket].slots[slot].param_idx, i);
            }
        }
        prop_assert_eq!(layout.place(params.len()), None);

        let mut seen: Vec<Vec<u32>> = sizes.iter().map(|(n, _)| vec![0; *n]).collect();
        for (index, bucket) in layout.buckets().iter().enumerate() {
            // Slots follow each other without gaps.
            let mut end = 0;
            for slot in &bucket.slots {
                prop_assert_eq!(slot.range.start, end);
                prop_assert_eq!(slot.range.len(), sizes[slot.param_idx].0);
                end = slot.range.end;
            }
            prop_assert_eq!((bucket.len(), bucket.is_empty()), (end, end == 0));

            // Padded to a multiple, by less than one element per rank; the slices cover it.
            prop_assert_eq!(bucket.padded_len % world_size, 0);
            prop_assert!(bucket.padded_len - bucket.len() < world_size);
            let slices: Vec<_> = (0..world_size).map(|r| bucket.slice(r, world_size)).collect();
            prop_assert_eq!(slices[0].start, 0);
            prop_assert!(slices.windows(2).all(|w| w[0].end == w[1].start && w[0].len() == w[1].len()));
            prop_assert_eq!(slices[world_size - 1].end, bucket.padded_len);

            // Within the cap, unless one parameter is larger; and as full as the order allows.
            let cap = |index: usize| if index == 0 { first } else { rest };
            let filled = bucket.slots.iter().filter(|s| !s.range.is_empty()).count();
            prop_assert!(bucket.len() <= cap(index) || filled == 1);
            if let Some(next) = layout.buckets().get(index + 1) {
                prop_assert!(bucket.len() + next.slots[0].range.len() > cap(index));
            }

            // Segments say the same from three sides.
            for owned in slices {
                for s in bucket.segments(owned.clone()) {
                    let (_, slot) = layout.place(s.param_idx).expect("it is trained");
                    let start = bucket.slots[slot].range.start;
                    prop_assert!(!s.in_param.is_empty());
                    prop_assert_eq!(&s.in_bucket, &(start + s.in_param.start..start + s.in_param.end));
                    prop_assert_eq!(&s.in_bucket, &(owned.start + s.in_owned.start..owned.start + s.in_owned.end));
                    prop_assert!(s.in_owned.end <= owned.len());
                    s.in_param.for_each(|i| seen[s.param_idx][i] += 1);
                }
            }
        }
        for (seen, (_, frozen)) in seen.iter().zip(&sizes) {
            prop_assert!(seen.iter().all(|n| *n == u32::from(!frozen)), "each trained element has one owner");
        }
        let padded: Vec<usize> = layout.buckets().iter().map(|b| b.padded_len).collect();
        prop_assert_eq!(layout.padded_len(), padded.iter().sum::<usize>());
        prop_assert_eq!(layout.max_padded_len(), padded.into_iter().max().unwrap_or(0));
        prop_assert_eq!(layout.world_size(), world_size);
    }
}

#[test]
fn c09_caps_of_zero_are_refused_by_name() {
    expect_error(BucketCaps::new(0), &["bucket_cap", "0"]);
    expect_error(BucketCaps::with_first(0, 100), &["first_bucket_cap", "0"]);
    expect_error(BucketCaps::with_first(100, 0), &["bucket_cap", "0"]);
}

fn params_per_bucket(lens: &[(usize, bool)], caps: BucketCaps) -> Vec<usize> {
    let layout = layout_of(lens, caps);
    layout.buckets().iter().map(|b| b.slots.len()).collect()
}

fn layout_of(lens: &[(usize, bool)], caps: BucketCaps) -> BucketLayout {
    let params = params(lens).expect("new names");
    let (order, accum): (Vec<usize>, _) = ((0..params.len()).collect(), GradAccumDType::F32);
    BucketLayout::new(&ParamSpec::of_all(&params), &order, caps, accum, 2)
}

/// 1 MiB, then an eighth of all gradients that are trained, from 1 to 25 MiB.
#[test]
fn the_default_caps_fit_the_model() {
    let count = |lens: &[(usize, bool)]| params_per_bucket(lens, BucketCaps::default());
    let half_mib = 1 << 17;
    // An eighth of 3 MiB is less than 1 MiB.
    assert_eq!(count(&[(half_mib, false); 6]), [2, 2, 2]);
    // An eighth of 32 MiB; the frozen ones do not count.
    let eighths = [2, 8, 8, 8, 8, 8, 8, 8, 6];
    assert_eq!(count(&[(half_mib, false); 64]), eighths);
    let half_frozen: Vec<_> = (0..128).map(|i| (half_mib, i % 2 == 0)).collect();
    assert_eq!(count(&half_frozen), eighths);
    // An eighth of 260 MiB is more than 25 MiB.
    let sizes = [&[1][..], &[5; 10], &[1]].concat();
    assert_eq!(count(&[(10 * half_mib, false); 52]), sizes);
    let layout = layout_of(&[(half_mib, false); 64], BucketCaps::default());
    let fit = BucketCaps::new(4 << 20).expect("positive");
    assert_eq!(layout.caps(), fit, "this is in the manifest");
}

#[test]
fn given_caps_stay_as_they_are() {
    // 0.6 MiB each: one fits in the first bucket, 41 in the second, the rest in the third.
    let count = |caps: Result<BucketCaps>| {
        params_per_bucket(&[(157_286, false); 44], caps.expect("positive"))
    };
    assert_eq!(count(BucketCaps::new(25 << 20)), [1, 41, 2]);
    assert_eq!(count(BucketCaps::with_first(25 << 20, 25 << 20)), [41, 3]);
    assert_eq!(count(BucketCaps::new(usize::MAX)), [1, 43]);
}

#[test]
fn a_bucket_is_labelled_with_its_parameters() {
    let params = params(&[(3, false), (2, true), (1, false)]).expect("new names");
    let (caps, accum) = (BucketCaps::default(), GradAccumDType::F32);
    let layout = BucketLayout::new(&ParamSpec::of_all(&params), &[0, 1, 2], caps, accum, 4);
    let bucket = &layout.buckets()[0];
    assert_eq!(
        (&*bucket.label, bucket.len(), bucket.padded_len),
        ("bucket 0: p2, p0", 4, 4)
    );
}

/// Layers of a bf16 model with f32 norms between them: one bucket per dtype is filled at a time.
fn mixed_layers() -> Result<Vec<Param>> {
    let store = ParamStore::new(&Device::Cpu);
    let vb = |dtype| store.var_builder(dtype);
    for i in 0..4 {
        ones(&vb(DType::BF16), 10, &format!("linear{i}"))?;
        ones(&vb(DType::F32), 2, &format!("norm{i}"))?;
    }
    Ok(store.params())
}

#[test]
fn dtypes_have_buckets_of_their_own() {
    let params = mixed_layers().expect("new names");
    let order: Vec<usize> = (0..params.len()).collect();
    let labels = |accum, bytes| {
        let caps = BucketCaps::with_first(bytes, bytes).expect("positive");
        let layout = BucketLayout::new(&ParamSpec::of_all(&params), &order, caps, accum, 2);
        let buckets = layout.buckets().iter();
        buckets
            .map(|b| (b.label.to_string(), b.dtype, b.grad_dtype))
            .collect::<Vec<_>>()
    };
    let (bf16, f32) = (DType::BF16, DType::F32);
    let expected = |grad_dtype| {
        [
            ("bucket 0: linear3, linear2".to_string(), bf16, grad_dtype),
            ("bucket 1: norm3, norm2, norm1, norm0".to_string(), f32, f32),
            ("bucket 2: linear1, linear0".to_string(), bf16, grad_dtype),
        ]
    };
    // The cap counts the gradients as they are kept.
    assert_eq!(labels(GradAccumDType::F32, 80), expected(f32));
    assert_eq!(labels(GradAccumDType::Parameter, 40), expected(bf16));
    assert_eq!(labels(GradAccumDType::Parameter, 80).len(), 2);
}
