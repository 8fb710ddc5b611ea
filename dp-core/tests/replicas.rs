use candle_core::{DType, Tensor};
use candle_nn::{Module, Optimizer, VarBuilder, VarMap};
use dp_core::{DistributedDataParallel, Error, ParamStore, Rank, Result, Sgd, Trainer, VarMapSync};

use crate::support::{Numbers, builder, expect_error, ones, ranks, values};

#[test]
fn c02_all_ranks_start_with_rank_0s_values_and_stay_equal() {
    let digests = ranks(3, |rank| {
        // Each rank starts with values of its own, buffers and frozen parameters too.
        let store = ParamStore::new(rank.device())
            .with_seed(rank.rank() as u64)
            .with_frozen(|n| n.starts_with("frozen"));
        let vb = builder(&store);
        let layer = candle_nn::linear(4, 3, vb.pp("fc"))?;
        candle_nn::linear(2, 2, vb.pp("frozen"))?;
        let init = candle_nn::Init::Randn {
            mean: 0.0,
            stdev: 1.0,
        };
        vb.get_with_hints(5, "norm.running_mean", init)?;
        let mut digests = vec![store.sha256()?];
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
        digests.push(trainer.store().sha256()?);
        let mut numbers = Numbers::new(100 + rank.rank() as u64);
        for _ in 0..5 {
            let loss = layer.forward(&numbers.tensor((6, 4)))?.sqr()?.mean_all()?;
            trainer.backward(&loss)?;
            trainer.step()?;
            digests.push(trainer.store().sha256()?);
        }
        Ok(digests)
    });
    assert_ne!(digests[0][0], digests[1][0]);
    assert_eq!(digests[0][0], digests[0][1]);
    for rank in 1..3 {
        assert_eq!(digests[rank][1..], digests[0][1..]);
    }
    assert_ne!(digests[0][1], digests[0][6]);
}

#[test]
fn c02_varmaps_of_candle_start_equal_too() {
    let weights = ranks(3, |rank| {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, rank.device());
        let layer = candle_nn::linear(4, 3, vb)?;
        let before = values(layer.weight());
        let sync = VarMapSync::new(&varmap, rank.comm())?;
        let mut optimizer = candle_nn::SGD::new(varmap.all_vars(), 0.1)?;
        let mut numbers = Numbers::new(rank.rank() as u64);
        let start = values(layer.weight());
        for _ in 0..5 {
            let loss = layer.forward(&numbers.tensor((6, 4)))?.sqr()?.mean_all()?;
            let mut grads = loss.backward()?;
            sync.all_reduce(&mut grads)?;
            optimizer.step(&grads)?;
        }
        Ok((before, start, values(layer.weight())))
    });
    // Candle's generator cannot be seeded, so the ranks really differed.
    assert_ne!(weights[0].0, weights[1].0);
    assert!(weights.iter().all(|w| w.1 == weights[0].0));
    assert!(weights.iter().all(|w| w.2 == weights[0].2));
}

fn probe_map(rank: &Rank) -> Result<(VarMap, Tensor)> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, rank.device());
    let w = ones(&vb, (), "w")?;
    Ok((varmap, w))
}

#[test]
fn c03_one_map_in_all_ranks_is_refused() {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &candle_core::Device::Cpu);
    let w = ones(&vb, (), "w").expect("a new name");
    ranks(4, move |rank| {
        let error = expect_error(
            VarMapSync::new(&varmap, rank.comm()),
            &["share the memory", "`w`", "closure"],
        );
        assert!(matches!(error, Error::Misuse { .. }));
        Ok(())
    });
    assert_eq!(values(&w), [1.0]);
}

#[test]
fn c03_a_map_per_rank_is_updated_once() {
    let ends = ranks(4, |rank| {
        let (varmap, w) = probe_map(&rank)?;
        let sync = VarMapSync::new(&varmap, rank.comm())?;
        let mut sgd = candle_nn::SGD::new(varmap.all_vars(), 0.25)?;
        let mut step = |g: f64| -> Result<()> {
            let mut grads = (&w * g)?.backward()?;
            sync.all_reduce(&mut grads)?;
            Ok(sgd.step(&grads)?)
        };
        step(1.0)?;
        assert_eq!(values(&w), [0.75]);
        let mut noise = Numbers::new(rank.rank() as u64);
        (0..300).try_for_each(|_| step(noise.unit()))?;
        Ok(values(&w))
    });
    assert!(
        ends.iter().all(|w| *w == ends[0]) && ends[0] != [0.75],
        "{ends:?}"
    );
}

#[test]
fn varmap_gradients_of_some_ranks_count_as_zero_on_the_others() {
    ranks(2, |rank| {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, rank.device());
        let [p, q, r] = ["p", "q", "r"].map(|n| ones(&vb, 2, n).expect("a new name"));
        let sync = VarMapSync::new(&varmap, rank.comm())?;
        let loss = match rank.rank() {
            0 => ((&p * 1.0)? + (&q * 4.0)?)?,
            _ => (&p * 3.0)?,
        };
        let mut grads = loss.sum_all()?.backward()?;
        sync.all_reduce(&mut grads)?;
        assert_eq!(values(grads.get(&p).expect("used")), [2.0; 2]);
        assert_eq!(values(grads.get(&q).expect("used by rank 0")), [2.0; 2]);
        assert!(grads.get(&r).is_none());
        Ok(())
    });
}

#[test]
fn variables_made_after_the_sync_are_refused() {
    ranks(2, |rank| {
        let (map, w) = probe_map(&rank)?;
        let sync = VarMapSync::new(&map, rank.comm())?;
        let late =
            candle_nn::VarBuilder::from_varmap(&map, DType::F32, rank.device()).get(2, "late")?;
        let mut grads = (w.sum_all()? + late.sum_all()?)?.backward()?;
        expect_error(
            sync.all_reduce(&mut grads),
            &["`late`", "created after VarMapSync::new"],
        );
        Ok(())
    });
}

#[test]
fn varmaps_that_differ_are_refused_on_every_rank() {
    ranks(3, |rank| {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, rank.device());
        ones(&vb, if rank.rank() == 2 { 3 } else { 2 }, "w")?;
        expect_error(
            VarMapSync::new(&varmap, rank.comm()),
            &["rank 2", "`w`", "[3]", "[2]"],
        );
        Ok(())
    });
}

/// The parameters of one rank of three: name, shape, dtype, frozen.
type Spec = (&'static str, &'static [usize], DType, bool);

const SAME: [Spec; 3] = [
    ("a", &[3], DType::F32, false),
    ("b", &[4, 2], DType::F32, false),
    ("c", &[1], DType::F32, false),
];

/// All ranks build `SAME`, rank 1 builds `other`: every rank must name `parameter` and rank 1.
fn mismatch(other: &'static [Spec], parameter: &str, detail: &[&str]) {
    let texts = ranks(3, move |rank| {
        let specs = if rank.rank() == 1 { other } else { &SAME };
        let frozen: Vec<&str> = specs.iter().filter(|s| s.3).map(|s| s.0).collect();
        let store = ParamStore::new(rank.device()).with_frozen(move |n| frozen.contains(&n));
        for (name, shape, dtype, _) in specs {
            ones(&store.var_builder(*dtype), *shape, name)?;
        }
        let result = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1));
        Ok(result
            .map(drop)
            .map_err(|e| (matches!(e, Error::ReplicaMismatch { .. }), e.to_string())))
    });
    for (rank, result) in texts.iter().enumerate() {
        let Err((true, text)) = result else {
            panic!("rank {rank} got {result:?}");
        };
        assert!(
            text.contains(&format!("`{parameter}`")) && text.contains("rank 1"),
            "{text}"
        );
        assert!(
            detail.iter().all(|d| text.contains(d)),
            "{detail:?} in {text}"
        );
    }
    assert!(texts.iter().all(|t| *t == texts[0]), "{texts:?}");
}

#[test]
fn c12_i_one_parameter_more() {
    const D: Spec = ("d", &[1], DType::F32, false);
    mismatch(&[SAME[0], SAME[1], SAME[2], D], "d", &["missing on rank 0"]);
    mismatch(&[D, SAME[0], SAME[1], SAME[2]], "d", &["missing on rank 0"]);
    mismatch(&[SAME[0], SAME[1]], "c", &["missing there"]);
    mismatch(&[], "a", &["missing there"]);
}

#[test]
fn c12_ii_another_shape() {
    mismatch(
        &[SAME[0], ("b", &[2, 4], DType::F32, false), SAME[2]],
        "b",
        &["[2, 4]", "[4, 2]"],
    );
}

#[test]
fn c12_iii_another_dtype() {
    mismatch(
        &[SAME[0], ("b", &[4, 2], DType::BF16, false), SAME[2]],
        "b",
        &["bf16", "f32"],
    );
}

#[test]
fn c12_iv_another_name() {
    mismatch(
        &[SAME[0], ("x", &[4, 2], DType::F32, false), SAME[2]],
        "b",
        &["missing there"],
    );
}

#[test]
fn c12_v_frozen_on_one_rank() {
    mismatch(
        &[SAME[0], ("b", &[4, 2], DType::F32, true), SAME[2]],
        "b",
        &["frozen", "trained"],
    );
}

#[test]
fn another_creation_order_is_no_mismatch() {
    let digests = ranks(3, |rank| {
        let store = ParamStore::new(rank.device());
        let names = [["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"]][rank.rank()];
        for name in names {
            ones(
                &builder(&store),
                [3, 5, 1][name.as_bytes()[0] as usize - 97],
                name,
            )?;
        }
        let param = |store: &ParamStore, name| store.get(name).expect("just made").tensor().clone();
        let (a, b, c) = (param(&store, "a"), param(&store, "b"), param(&store, "c"));
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.25))?;
        let g = rank.rank() as f64;
        let loss = ((a.sum_all()? * g)? + (b.sum_all()? * (3.0 * g))?)?;
        trainer.backward(&(loss + (c.sum_all()? * 4.0)?)?)?;
        trainer.step()?;
        assert_eq!(
            (values(&a), values(&b), values(&c)),
            (vec![0.75; 3], vec![0.25; 5], vec![0.0])
        );
        trainer.store().sha256()
    });
    assert!(digests.iter().all(|d| *d == digests[0]));
}

#[test]
fn what_cannot_be_trained_is_refused_by_name() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        ones(&store.var_builder(DType::F64), 3, "double")?;
        let result = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1));
        let error = expect_error(result, &["double", "f64", "f32, f16 or bf16"]);
        assert!(matches!(error, Error::UnsupportedDType { .. }));
        // Frozen it may be: it is only broadcast.
        let store = ParamStore::new(rank.device()).with_frozen(|n| n == "double");
        ones(&store.var_builder(DType::F64), 3, "double")?;
        ones(&builder(&store), 3, "w")?;
        DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1)).map(drop)
    });
}
