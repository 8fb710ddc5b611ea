use candle_core::{DType, Tensor};
use candle_nn::{Init, VarBuilder};
use dp_core::{
    AdamW, BucketCaps, EngineConfig, Error, GradAccumDType, NonFinite, Optimizer, ParamKind,
    ParamShapes, ParamSpec, ParamStore, Rank, Result, Sgd, Trainer,
};
use dp_zero::{BytesPerElement, ModelStates, Sharding, TrainerPlan, TrainingStep};

use crate::support::{AnyTrainer, STRATEGIES, caps, ranks};

/// Dtypes of the parameters; two of them alternate.
type Dtypes = [DType; 2];

const F32: Dtypes = [DType::F32; 2];
const F16: Dtypes = [DType::F16; 2];
const BF16: Dtypes = [DType::BF16; 2];
const BF16_WITH_F32: Dtypes = [DType::BF16, DType::F32];
const F16_WITH_BF16: Dtypes = [DType::F16, DType::BF16];

const SHAPES: [&[usize]; 9] = [
    &[5, 7],
    &[3],
    &[],
    &[1],
    &[0, 7],
    &[11, 13],
    &[64],
    &[2, 3, 5],
    &[129],
];

fn is_frozen(name: &str) -> bool {
    name == "frozen"
}

/// Parameters of awkward sizes, one asked for twice, a frozen one and a buffer; returns those that are trained.
fn model(vb: impl Fn(DType) -> VarBuilder<'static>, dtypes: Dtypes) -> Result<Vec<Tensor>> {
    let get = |shape: &[usize], name: &str, i: usize| {
        vb(dtypes[i % 2]).get_with_hints(shape, name, Init::Const(0.5))
    };
    get(&[17], "frozen", 0)?;
    get(&[9], "bn.running_mean", 1)?;
    let shapes = SHAPES.into_iter().enumerate();
    let trained = shapes.map(|(i, shape)| get(shape, &format!("p{i}"), i));
    let mut trained: Vec<Tensor> = trained.collect::<candle_core::Result<_>>()?;
    trained.push(get(SHAPES[0], "p0", 0)?);
    Ok(trained)
}

fn loss(trained: &[Tensor]) -> Result<Tensor> {
    let mut sum = Tensor::zeros((), DType::F32, &candle_core::Device::Cpu)?;
    for tensor in trained {
        sum = (sum + tensor.to_dtype(DType::F32)?.sqr()?.sum_all()?)?;
    }
    Ok(sum)
}

fn specs(dtypes: Dtypes) -> Result<Vec<ParamSpec>> {
    let shapes = ParamShapes::new().with_frozen(is_frozen);
    model(|dtype| shapes.var_builder(dtype), dtypes)?;
    Ok(shapes.specs())
}

const CLIPPED: TrainingStep = TrainingStep {
    num_micro_batches: 3,
    clips_norm: true,
};

/// Plans first, then trains, and compares; returns the bytes that this rank sent in a step, and in one of [`CLIPPED`].
fn train<O: Optimizer>(
    rank: &Rank,
    plan: &TrainerPlan,
    dtypes: Dtypes,
    optimizer: O,
    config: &EngineConfig,
) -> Result<[u64; 2]> {
    let store = ParamStore::new(rank.device()).with_frozen(is_frozen);
    let trained = model(|dtype| store.var_builder(dtype), dtypes)?;
    assert_eq!(ParamSpec::of_all(&store.params()), specs(dtypes)?);
    let ledger = store.ledger().clone();
    let mut trainer = AnyTrainer::with_settings(plan.sharding, store, rank, optimizer, |engine| {
        *engine = config.clone();
    })?;
    assert_eq!(Some(trainer.layout().buckets().len()), plan.num_buckets);
    let held = || ModelStates::from(ledger.current());
    assert_eq!(held(), plan.states);

    let before = rank.comm().traffic().bytes_sent();
    trainer.backward(&loss(&trained)?)?;
    trainer.step()?;
    let sent = rank.comm().traffic().bytes_sent() - before;
    let peak = ledger.peak();
    assert_eq!(
        Some(peak.communication),
        plan.communication.max(plan.set_up)
    );

    // Several micro-batches take no more.
    ledger.reset_peak();
    let before = rank.comm().traffic().bytes_sent();
    let mut window = trainer.accumulate(3)?;
    (0..3).try_for_each(|_| window.backward(&loss(&trained)?))?;
    window.finish()?;
    trainer.clip_grad_norm(1.0)?;
    trainer.step()?;
    let clipped = rank.comm().traffic().bytes_sent() - before;
    let peak = ledger.peak();
    assert_eq!(Some(peak.communication), plan.communication);
    assert_eq!(
        (peak.parameters, peak.gradients, peak.optimizer),
        (
            plan.states.parameters,
            plan.states.gradients,
            plan.states.optimizer
        )
    );
    assert_eq!(held(), plan.states);
    Ok([sent, clipped])
}

fn check<O: Optimizer + Sync>(
    strategy: Sharding,
    world_size: usize,
    dtypes: Dtypes,
    optimizer: O,
    config: &EngineConfig,
) {
    let specs = specs(dtypes).expect("a model");
    let num_states = optimizer.state_names().len();
    let plan =
        TrainerPlan::of_specs(&specs, world_size, strategy, num_states, config).expect("trainable");
    assert!(plan.is_exact());
    let clipped = TrainerPlan::of_steps(&specs, world_size, strategy, num_states, config, CLIPPED)
        .expect("trainable");
    let config = config.clone();
    let sent = ranks(world_size, move |rank| {
        train(&rank, &plan, dtypes, optimizer.clone(), &config)
    });
    let context = format!("{strategy:?}, {world_size} ranks, {dtypes:?}");
    for (i, plan) in [plan, clipped].into_iter().enumerate() {
        let most = sent.iter().map(|sent| sent[i]).max();
        assert_eq!(most, Some(plan.bytes_sent_per_step), "{context}");
        assert_eq!(plan.bytes_sent_by_rank_0, Some(sent[0][i]), "{context}");
    }
}

fn config(change: impl FnOnce(&mut EngineConfig)) -> EngineConfig {
    let mut config = EngineConfig::default();
    change(&mut config);
    config
}

#[test]
fn what_is_planned_is_what_a_trainer_counts() {
    let parameter = GradAccumDType::Parameter;
    let cases = [
        (F32, config(|_| ())),
        (F32, config(|c| c.bucket_caps = caps(40))),
        (F32, config(|c| c.communication_dtype = Some(DType::BF16))),
        (BF16, config(|c| c.bucket_caps = caps(60))),
        (
            BF16,
            config(|c| c.bucket_caps = BucketCaps::with_first(8, 600).expect("positive")),
        ),
        (BF16, config(|c| c.broadcast_buffers = false)),
        (F16, config(|c| c.non_finite = NonFinite::SkipStep)),
        (
            F16,
            config(|c| (c.grad_accum_dtype, c.bucket_caps) = (parameter, caps(30))),
        ),
        (BF16_WITH_F32, config(|c| c.bucket_caps = caps(20))),
        (BF16_WITH_F32, config(|c| c.grad_accum_dtype = parameter)),
        (
            BF16_WITH_F32,
            config(|c| {
                c.bucket_caps = caps(50);
                c.grad_accum_dtype = parameter;
                c.communication_dtype = Some(DType::BF16);
            }),
        ),
        (
            F16_WITH_BF16,
            config(|c| c.communication_dtype = Some(DType::F16)),
        ),
    ];
    for (dtypes, config) in &cases {
        for strategy in STRATEGIES {
            for world_size in 1..=4 {
                check(strategy, world_size, *dtypes, AdamW::default(), config);
            }
        }
    }
}

#[test]
fn what_is_planned_depends_on_the_optimizers_state() {
    let momentum = Sgd {
        momentum: 0.9,
        ..Sgd::new(0.1)
    };
    for strategy in STRATEGIES {
        check(strategy, 3, BF16, momentum.clone(), &config(|_| ()));
        check(strategy, 3, F32, Sgd::new(0.1), &config(|_| ()));
    }
}

#[test]
fn a_plan_without_buffers_or_trained_parameters() {
    let spec = |kind| ParamSpec {
        name: "w".to_string(),
        shape: vec![10],
        dtype: DType::F32,
        kind,
    };
    let plan = |specs: &[ParamSpec], sharding| {
        TrainerPlan::of_specs(specs, 4, sharding, 2, &EngineConfig::default())
    };
    for sharding in Sharding::ALL {
        let frozen = plan(&[spec(ParamKind::Frozen)], sharding).expect("a plan");
        assert_eq!(frozen.states.total(), 40);
        let nothing = plan(&[], sharding).expect("a plan");
        assert_eq!(nothing.states.total(), 0);
    }
    // 12 padded elements: a shard of 3 of each, in four kinds of numbers.
    let zero3 = plan(&[spec(ParamKind::Trained)], Sharding::Zero3).expect("a plan");
    assert_eq!(zero3.states.total(), 16 * 3);
    assert_eq!(zero3.bytes_sent_per_step, 3 * 3 * (4 + 2 * 4));
    assert!(!zero3.is_exact());

    let integers = ParamSpec {
        dtype: DType::I64,
        ..spec(ParamKind::Trained)
    };
    let refused = plan(&[integers], Sharding::Ddp);
    assert!(
        matches!(refused, Err(Error::UnsupportedDType { .. })),
        "{refused:?}"
    );
    let config = EngineConfig::default();
    let refused = TrainerPlan::of_specs(&[], 0, Sharding::Ddp, 2, &config);
    assert!(
        matches!(refused, Err(Error::InvalidArgument { .. })),
        "{refused:?}"
    );
}

/// The fullest moment is while the trainer is made, where states are sharded over many ranks.
#[test]
fn the_peak_knows_how_values_arrive() {
    let specs = [ParamSpec {
        name: "w".to_string(),
        shape: vec![1 << 20],
        dtype: DType::BF16,
        kind: ParamKind::Trained,
    }];
    let mut config = EngineConfig::default();
    config.grad_accum_dtype = GradAccumDType::Parameter;
    let plan = |sharding| TrainerPlan::of_specs(&specs, 1024, sharding, 2, &config);
    let zero1 = plan(Sharding::Zero1).expect("a plan");
    assert_eq!(
        (zero1.set_up, zero1.communication),
        (Some(2 << 20), Some(0))
    );
    assert_eq!(zero1.peak(7), zero1.states.total() + 7);
    let zero3 = plan(Sharding::Zero3).expect("a plan");
    assert_eq!(zero3.peak(7), zero3.states.total() + 7);
    let frozen = [ParamSpec {
        kind: ParamKind::Frozen,
        ..specs[0].clone()
    }];
    let plan = TrainerPlan::of_specs(&frozen, 2, Sharding::Zero2, 2, &config).expect("a plan");
    assert_eq!(plan.peak(7), 4 << 20);
}

/// Ranks, and GB for models of 7.5B, 128B and 1T parameters with each of [`PAPER`].
type PaperRow = (usize, [f64; 3], [f64; 3], [f64; 3]);

/// `P_os`, `P_os+g` and `P_os+g+p` of arXiv 1910.02054.
const PAPER: [Sharding; 3] = [Sharding::Zero1, Sharding::Zero2, Sharding::Zero3];

fn gigabytes(num_params: u64, world_size: usize, sharding: Sharding) -> f64 {
    let bytes = BytesPerElement::MIXED_ADAM;
    let plan = TrainerPlan::of_count(num_params, world_size, sharding, bytes, bytes.gradients);
    plan.expect("at least 1 rank").states.total() as f64 / 1e9
}

/// Table 1: memory per device for each degree of data parallelism. The paper rounds to as many digits as it prints below 100 GB, and
/// cuts off from there on.
#[test]
fn table_1_of_the_paper() {
    const B: u64 = 1_000_000_000;
    let table: [PaperRow; 6] = [
        (
            1,
            [120., 120., 120.],
            [2048., 2048., 2048.],
            [16000., 16000., 16000.],
        ),
        (
            4,
            [52.5, 41.3, 30.],
            [896., 704., 512.],
            [7000., 5500., 4000.],
        ),
        (
            16,
            [35.6, 21.6, 7.5],
            [608., 368., 128.],
            [4750., 2875., 1000.],
        ),
        (
            64,
            [31.4, 16.6, 1.88],
            [536., 284., 32.],
            [4187., 2218., 250.],
        ),
        (
            256,
            [30.4, 15.4, 0.47],
            [518., 263., 8.],
            [4046., 2054., 62.5],
        ),
        (
            1024,
            [30.1, 15.1, 0.12],
            [513., 257., 2.],
            [4011., 2013., 15.6],
        ),
    ];
    for (world_size, small, medium, large) in table {
        for (num_params, printed) in [(15 * B / 2, small), (128 * B, medium), (1000 * B, large)] {
            for (sharding, printed) in PAPER.into_iter().zip(printed) {
                let computed = gigabytes(num_params, world_size, sharding);
                let as_printed = match computed {
                    x if x >= 100.0 => x.floor(),
                    x if x < 2.0 => (x * 100.0).round() / 100.0,
                    x => (x * 10.0).round() / 10.0,
                };
                assert_eq!(
                    as_printed, printed,
                    "{num_params} on {world_size}, {sharding:?}"
                );
            }
        }
    }
}

/// Figure 1: 7.5B parameters, 64 ranks. And section 7: stage 3 sends half as much again as the others.
#[test]
fn figure_1_and_the_traffic_of_the_paper() {
    let figure = Sharding::ALL.map(|s| (gigabytes(7_500_000_000, 64, s) * 10.0).round() / 10.0);
    assert_eq!(figure, [120.0, 31.4, 16.6, 1.9]);
    let sent = Sharding::ALL.map(|s| {
        TrainerPlan::of_count(64_000, 64, s, BytesPerElement::MIXED_ADAM, 2)
            .map(|p| p.bytes_sent_per_step)
            .expect("at least 1 rank")
    });
    // 2 bytes of each element, twice or three times, but for the rank's own share.
    assert_eq!(sent, [2, 2, 2, 3].map(|times| times * 2 * 63 * 1000));
    let refused = TrainerPlan::of_count(1, 0, Sharding::Ddp, BytesPerElement::f32(2), 4);
    assert!(
        matches!(refused, Err(Error::InvalidArgument { .. })),
        "{refused:?}"
    );
}
