use dp_core::{DistributedSampler, Error, Remainder, weighted_mean};
use serde_json::Value;

use crate::optim::fixture;
use crate::support::{expect_error, ranks};

fn sampler(len: usize, world_size: usize, rank: usize) -> DistributedSampler {
    DistributedSampler::new(len, world_size, rank).expect("a rank of the world")
}

#[test]
fn without_shuffle_it_deals_as_pytorch_does() {
    let fixture = fixture();
    let cases = fixture["sampler"].as_array().expect("an array");
    assert_eq!(cases.len(), 50);
    for case in cases {
        let len = case["len"].as_u64().expect("a number") as usize;
        let remainder = match case["drop"] == Value::Bool(true) {
            true => Remainder::Drop,
            false => Remainder::Pad,
        };
        let all = case["ranks"].as_array().expect("an array");
        for (rank, expected) in all.iter().enumerate() {
            let expected: Vec<usize> = serde_json::from_value(expected.clone()).expect("indices");
            let sampler = sampler(len, all.len(), rank).with_remainder(remainder);
            assert_eq!(
                sampler.indices(0),
                expected,
                "{len} samples, rank {rank} of {}",
                all.len()
            );
            assert_eq!(sampler.num_samples(), expected.len());
            assert_eq!(sampler.indices(9), expected);
        }
    }
}

/// The order that all ranks' indices make together.
fn order(len: usize, world_size: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let all: Vec<_> = (0..world_size)
        .map(|rank| {
            let sampler = sampler(len, world_size, rank).with_remainder(Remainder::Keep);
            sampler.with_shuffle(seed).indices(epoch)
        })
        .collect();
    (0..len)
        .map(|i| all[i % world_size][i / world_size])
        .collect()
}

#[test]
fn shuffling_is_a_permutation_by_seed_and_epoch() {
    let base = order(50, 4, 7, 0);
    let mut sorted = base.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..50).collect::<Vec<_>>());
    assert_ne!(base, sorted);
    assert_eq!(order(50, 4, 7, 0), base);
    assert_ne!(order(50, 4, 7, 1), base);
    assert_ne!(order(50, 4, 8, 0), base);
    // Not a shift of the seed: (seed, epoch + 1) is something else than (seed + 1, epoch).
    assert_ne!(order(50, 4, 7, 1), order(50, 4, 8, 0));
    // One order for all world sizes.
    for world_size in [1, 2, 3, 8] {
        assert_eq!(order(50, world_size, 7, 3), order(50, 4, 7, 3));
    }
}

#[test]
fn shuffled_ranks_pad_and_drop_alike() {
    for len in [1usize, 3, 10, 50] {
        for world_size in [1, 2, 3, 4, 8] {
            for (remainder, expected) in [
                (Remainder::Pad, len.div_ceil(world_size)),
                (Remainder::Drop, len / world_size),
            ] {
                let mut counts = vec![0usize; len];
                for rank in 0..world_size {
                    let sampler = sampler(len, world_size, rank)
                        .with_shuffle(1)
                        .with_remainder(remainder);
                    assert_eq!(sampler.indices(2).len(), expected);
                    sampler.indices(2).iter().for_each(|i| counts[*i] += 1);
                }
                let (least, most) = (counts.iter().min(), counts.iter().max());
                match remainder {
                    Remainder::Pad => {
                        assert!(least >= Some(&1) && most <= Some(&world_size.div_ceil(len).max(2)))
                    }
                    _ => assert!(most <= Some(&1)),
                }
            }
        }
    }
}

#[test]
fn keep_deals_each_sample_once() {
    for len in [1, 2, 5, 8, 13] {
        for world_size in [1, 2, 3, 4, 8] {
            let mut seen = Vec::new();
            for rank in 0..world_size {
                let sampler = sampler(len, world_size, rank).with_remainder(Remainder::Keep);
                assert_eq!(sampler.num_samples(), sampler.indices(0).len());
                seen.extend(sampler.indices(0));
            }
            seen.sort_unstable();
            assert_eq!(seen, (0..len).collect::<Vec<_>>());
        }
    }
}

#[test]
fn c52_the_mean_over_an_uneven_dataset_is_exact() {
    for world_size in [1, 2, 3, 4, 8] {
        let means = ranks(world_size, move |rank| {
            let sampler = DistributedSampler::new(5, world_size, rank.rank())?
                .with_remainder(Remainder::Keep);
            let mine: Vec<f64> = sampler.indices(0).iter().map(|i| (i + 1) as f64).collect();
            weighted_mean(rank.comm().as_ref(), mine.iter().sum(), mine.len() as f64)
        });
        assert!(means.iter().all(|m| *m == 3.0), "{means:?}");
    }
    let one = ranks(2, |rank| {
        let sampler = DistributedSampler::new(1, 2, rank.rank())?.with_remainder(Remainder::Keep);
        let n = sampler.indices(0).len() as f64;
        weighted_mean(rank.comm().as_ref(), 7.0 * n, n)
    });
    assert_eq!(one, [7.0, 7.0]);
}

#[test]
fn nothing_to_average_is_an_error_on_every_rank() {
    ranks(2, |rank| {
        expect_error(
            weighted_mean(rank.comm().as_ref(), 0.0, 0.0),
            &["weight", "zero"],
        );
        Ok(())
    });
}

#[test]
fn impossible_samplers_are_refused() {
    let error = expect_error(DistributedSampler::new(0, 2, 0), &["dataset", "no samples"]);
    assert!(matches!(error, Error::InvalidArgument { .. }));
    expect_error(DistributedSampler::new(5, 2, 2), &["rank", "2"]);
    expect_error(DistributedSampler::new(5, 0, 0), &["rank"]);
}

/// The rest of an epoch is dealt as an epoch is, also after a number of samples that the ranks do not divide.
#[test]
fn the_rest_of_an_epoch() {
    let deal = |remainder, consumed| -> Vec<Vec<usize>> {
        (0..3)
            .map(|rank| {
                let sampler = DistributedSampler::new(10, 3, rank)
                    .expect("valid")
                    .with_remainder(remainder);
                sampler.indices_after(0, consumed)
            })
            .collect()
    };
    assert_eq!(deal(Remainder::Keep, 5), [vec![5, 8], vec![6, 9], vec![7]]);
    assert_eq!(deal(Remainder::Drop, 5), [[5], [6], [7]]);
    assert_eq!(deal(Remainder::Pad, 5), [[5, 8], [6, 9], [7, 0]]);
    assert_eq!(deal(Remainder::Keep, 10), [[]; 3] as [[usize; 0]; 3]);
    assert_eq!(deal(Remainder::Pad, 99), [[]; 3] as [[usize; 0]; 3]);
}
