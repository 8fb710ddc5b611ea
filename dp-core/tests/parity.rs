use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module, Optimizer as _, VarBuilder, VarMap};
use dp_core::{
    AdamW, BucketCaps, DdpConfig, DistributedDataParallel, ParamStore, Rank, Result, Sgd, Trainer,
};

use crate::support::{Numbers, builder, ones, ranks, values};

/// Tanh between two linear layers, and a parameter that nobody uses.
struct Mlp {
    first: Linear,
    second: Linear,
}

impl Mlp {
    fn new(vb: VarBuilder) -> Result<Self> {
        ones(&vb, 5, "unused")?;
        Ok(Self {
            first: candle_nn::linear(4, 8, vb.pp("first"))?,
            second: candle_nn::linear(8, 1, vb.pp("second"))?,
        })
    }

    /// The mean over the samples of the batch.
    fn loss(&self, batch: &Tensor) -> Result<Tensor> {
        let y = self.second.forward(&self.first.forward(batch)?.tanh()?)?;
        Ok((y - batch.sum_keepdim(1)?)?.sqr()?.mean_all()?)
    }
}

/// The joined batch of `step`: 72 samples.
fn joined(step: usize) -> Tensor {
    Numbers::new(step as u64).tensor((72, 4))
}

fn part(batch: &Tensor, index: usize, of: usize) -> Result<Tensor> {
    let len = batch.dim(0)? / of;
    Ok(batch.narrow(0, index * len, len)?)
}

/// All values of all parameters, by name.
type Values = BTreeMap<String, Vec<f32>>;

fn values_of(store: &ParamStore) -> Values {
    store
        .params()
        .iter()
        .map(|p| (p.name().to_string(), values(p.tensor())))
        .collect()
}

#[derive(Clone, Copy, PartialEq)]
enum Rule {
    Sgd,
    AdamW,
}

/// What single-process candle makes of the joined batches: VarMap and candle_nn's optimizers.
fn candle_alone(rule: Rule, num_steps: usize) -> Result<Values> {
    let store = ParamStore::new(&Device::Cpu).with_seed(7);
    Mlp::new(builder(&store))?;
    let varmap = VarMap::new();
    for p in store.params() {
        let var = Var::from_tensor(&p.tensor().copy()?)?;
        varmap
            .data()
            .lock()
            .expect("not poisoned")
            .insert(p.name().to_string(), var);
    }
    let model = Mlp::new(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
    let mut sgd = candle_nn::SGD::new(varmap.all_vars(), 0.05)?;
    let mut adamw = candle_nn::AdamW::new_lr(varmap.all_vars(), 1e-2)?;
    for step in 0..num_steps {
        let loss = model.loss(&joined(step))?;
        match rule {
            Rule::Sgd => sgd.backward_step(&loss)?,
            Rule::AdamW => adamw.backward_step(&loss)?,
        }
    }
    let data = varmap.data().lock().expect("not poisoned");
    Ok(data
        .iter()
        .map(|(name, var)| (name.clone(), values(var)))
        .collect())
}

/// Trains on `ranks * micro_batches` equal parts of each joined batch; part `i` of rank `r` is `r * micro_batches + i`.
fn parallel(
    rank: &Rank,
    rule: Rule,
    num_steps: usize,
    micro_batches: usize,
    cap: usize,
) -> Result<Values> {
    fn train(
        trainer: &mut impl Trainer,
        model: &Mlp,
        rank: &Rank,
        num_steps: usize,
        micro_batches: usize,
    ) -> Result<Values> {
        let parts = rank.world_size() * micro_batches;
        for step in 0..num_steps {
            let batch = joined(step);
            if micro_batches == 1 {
                trainer.backward(&model.loss(&part(&batch, rank.rank(), parts)?)?)?;
            } else {
                let mut window = trainer.accumulate(micro_batches)?;
                for i in 0..micro_batches {
                    let index = rank.rank() * micro_batches + i;
                    window.backward(&model.loss(&part(&batch, index, parts)?)?)?;
                }
                window.finish()?;
            }
            assert_eq!(trainer.step()?.unused, ["unused"]);
        }
        Ok(values_of(trainer.store()))
    }

    let store = ParamStore::new(rank.device()).with_seed(7);
    let model = Mlp::new(builder(&store))?;
    let config = DdpConfig::default().with_bucket_caps(BucketCaps::new(cap)?);
    let comm = rank.comm();
    match rule {
        Rule::Sgd => {
            let mut ddp =
                DistributedDataParallel::with_config(store, comm, Sgd::new(0.05), config)?;
            train(&mut ddp, &model, rank, num_steps, micro_batches)
        }
        Rule::AdamW => {
            let mut ddp =
                DistributedDataParallel::with_config(store, comm, AdamW::with_lr(1e-2), config)?;
            train(&mut ddp, &model, rank, num_steps, micro_batches)
        }
    }
}

fn run(
    world_size: usize,
    rule: Rule,
    num_steps: usize,
    micro_batches: usize,
    cap: usize,
) -> Values {
    let all = ranks(world_size, move |rank| {
        parallel(&rank, rule, num_steps, micro_batches, cap)
    });
    assert!(all.iter().all(|v| *v == all[0]), "ranks differ");
    all.into_iter().next().expect("at least one rank")
}

#[track_caller]
fn assert_close(a: &Values, b: &Values, what: &str) {
    assert_eq!(a.len(), b.len());
    for (name, a) in a {
        for (x, y) in a.iter().zip(&b[name]) {
            assert!(
                (x - y).abs() <= 1e-6 * y.abs().max(1.0),
                "{what}: {name} {x} against {y}"
            );
        }
    }
}

#[test]
fn one_rank_is_candle_to_the_bit() {
    for rule in [Rule::Sgd, Rule::AdamW] {
        let expected = candle_alone(rule, 10).expect("candle trains");
        assert!(run(1, rule, 10, 1, 100) == expected);
        assert_eq!(expected["unused"], [1.0; 5]);
    }
}

#[test]
fn c16_ranks_and_micro_batches_are_one_rank_on_the_joined_batch() {
    for rule in [Rule::Sgd, Rule::AdamW] {
        let expected = candle_alone(rule, 20).expect("candle trains");
        for world_size in [1, 2, 3, 4, 8] {
            for micro_batches in [1, 3] {
                let got = run(world_size, rule, 20, micro_batches, 1 << 20);
                assert_close(
                    &got,
                    &expected,
                    &format!("{world_size} ranks, {micro_batches} micro-batches"),
                );
            }
        }
    }
}

/// Data parallelism adds the ranks' gradients in the order in which one rank adds micro-batches, and divides once.
#[test]
fn ranks_are_micro_batches_to_the_bit() {
    for rule in [Rule::Sgd, Rule::AdamW] {
        for world_size in [2, 3, 4, 8] {
            assert!(
                run(world_size, rule, 5, 1, 100) == run(1, rule, 5, world_size, 100),
                "{world_size} ranks"
            );
        }
    }
}

#[test]
fn bucket_caps_do_not_change_a_bit() {
    for world_size in [2, 3] {
        let expected = run(world_size, Rule::AdamW, 5, 1, 1 << 30);
        for cap in [1, 4, 36, 40, 128, 132] {
            assert!(
                run(world_size, Rule::AdamW, 5, 1, cap) == expected,
                "cap {cap}"
            );
        }
    }
}
