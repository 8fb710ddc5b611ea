//! Makes the mistakes of the page "Debugging by symptom", and compares what is said of each with `symptoms.txt`, which
//! the page shows. `symptoms --print` prints what was said.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear, linear_no_bias};
use dp_core::{
    AdamW, BucketCaps, DdpConfig, DistributedDataParallel, EngineConfig, Error, Loss, NonFinite,
    ParamStore, Rank, Result, Sgd, Trainer, UnusedParameters, VarMapSync, World,
};
use dp_zero::{Sharding, ZeroConfig, ZeroOptimizer, ZeroStage};

const EXPECTED: &str = include_str!("symptoms.txt");

/// What a rank does.
type Mistake = fn(Rank) -> Result<()>;

fn main() -> Result<()> {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .without_time()
        .with_target(false)
        .with_ansi(false)
        .with_max_level(tracing::Level::WARN)
        .init();
    let mistakes: [(&str, usize, Mistake); 17] = [
        ("mixed_losses", 2, mixed_losses),
        ("late_variable", 1, late_variable),
        ("no_gradient", 2, no_gradient),
        ("rank_left", 2, rank_left),
        ("timeout", 2, timeout),
        ("mismatch", 2, mismatch),
        ("failed_rank", 2, failed_rank),
        ("other_model", 2, other_model),
        ("diverged", 2, diverged),
        ("learning_rate", 2, learning_rate),
        ("altered", 2, altered),
        ("stale_graph", 1, stale_graph),
        ("plain_backward", 1, plain_backward),
        ("two_backwards", 1, two_backwards),
        ("half_a_window", 1, half_a_window),
        ("late_parameter", 1, late_parameter),
        ("mixed_dtypes", 1, mixed_dtypes),
    ];
    let mut said: Vec<(&str, String)> = mistakes
        .into_iter()
        .map(|(name, ranks, f)| (name, failure(name, ranks, f)))
        .collect();
    said.push((
        "shared_varmap",
        failure_of("shared_varmap", shared_varmap()),
    ));
    log.take();
    said.push(("skipped", skipped()?));
    World::threads(2)?.run(unused)?;
    said.push(("unused", log.take()));
    World::threads(2)?.run(out_of_order)?;
    said.push(("out_of_order", log.take()));
    let said: Vec<(&str, String)> = said.into_iter().map(|(k, t)| (k, stable(&t))).collect();
    if std::env::args().any(|a| a == "--print") {
        for (name, text) in &said {
            println!("ANCHOR: {name}\n{text}\nANCHOR_END: {name}\n");
        }
        return Ok(());
    }
    for (name, text) in &said {
        let shown = section(name);
        let same = shown.is_some_and(|shown| words(shown) == words(text));
        assert!(
            same,
            "symptoms.txt has {shown:?} for {name}, but it is {text:?}"
        );
    }
    assert_eq!(EXPECTED.matches("ANCHOR: ").count(), said.len());
    Ok(())
}

/// What the page shows of a mistake.
fn section(name: &str) -> Option<&'static str> {
    let begin = EXPECTED.split_once(&format!("ANCHOR: {name}\n"))?.1;
    Some(begin.split_once(&format!("\nANCHOR_END: {name}\n"))?.0)
}

/// The words of a text, sorted and without the numbers of ranks: which rank fails first, and which one comes first where
/// two differ, is up to their speed.
fn words(text: &str) -> Vec<&str> {
    let mut words: Vec<&str> = Vec::new();
    for word in text.split_whitespace() {
        let is_number = word.trim_end_matches(',').parse::<usize>().is_ok();
        if !(is_number && words.last() == Some(&"rank")) {
            words.push(word.trim_end_matches([',', ';', ':']));
        }
    }
    words.sort_unstable();
    words
}

/// What a run of `f` fails with.
fn failure(name: &str, ranks: usize, f: Mistake) -> String {
    let world = World::threads(ranks).expect("there are ranks");
    let limit = Duration::from_secs(if name == "timeout" { 1 } else { 60 });
    failure_of(name, world.with_timeout(limit).run(f))
}

fn failure_of(name: &str, outcome: Result<()>) -> String {
    let error = outcome.err();
    error
        .unwrap_or_else(|| panic!("{name} is no mistake any more"))
        .to_string()
}

/// The text without what differs from run to run: padding, how long was waited, Candle's backtraces, and how many ranks
/// have logged the same.
fn stable(text: &str) -> String {
    let is_time = |word: &str| {
        let number = word
            .strip_suffix('s')
            .map(|w| w.trim_end_matches(['m', 'n', '\u{b5}']));
        number.is_some_and(|n| n.parse::<f64>().is_ok())
    };
    let is_backtrace = |line: &&str| line.trim_start().starts_with("0: ");
    let mut lines: Vec<String> = Vec::new();
    for line in text.trim().lines().take_while(|line| !is_backtrace(line)) {
        let words = line.split_whitespace();
        let words: Vec<&str> = words.map(|w| if is_time(w) { "1s" } else { w }).collect();
        lines.push(words.join(" "));
    }
    lines.dedup();
    lines.join("\n")
}

fn ddp(store: ParamStore, rank: &Rank) -> Result<DistributedDataParallel<Sgd>> {
    DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))
}

/// A model of one layer, and a trainer for it.
fn small(rank: &Rank) -> Result<(Linear, DistributedDataParallel<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let model = linear(2, 1, store.var_builder(DType::F32).pp("out"))?;
    Ok((model, ddp(store, rank)?))
}

fn loss(model: &impl Module) -> Result<Tensor> {
    let x = Tensor::ones((4, 2), DType::F32, &Device::Cpu)?;
    Ok(model.forward(&x)?.sqr()?.mean_all()?)
}

// --- The loss is not that of one device ------------------------------------------------------------------------------

fn mixed_losses(rank: Rank) -> Result<()> {
    let (model, mut trainer) = small(&rank)?;
    let loss = &loss(&model)?;
    match rank.rank() {
        0 => trainer.backward(loss)?,
        _ => trainer.backward_weighted(Loss::Mean { loss, count: 4 })?,
    }
    trainer.step().map(drop)
}

fn late_variable(rank: Rank) -> Result<()> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, rank.device());
    let model = linear(2, 1, vb.pp("out"))?;
    let ddp = VarMapSync::new(&varmap, rank.comm())?;
    linear_no_bias(2, 1, vb.pp("head"))?;
    ddp.all_reduce(&mut loss(&model)?.backward()?)
}

// --- A parameter without gradient ------------------------------------------------------------------------------------

/// Two layers of which one is used.
fn half_used(rank: &Rank, config: DdpConfig) -> Result<(Linear, DistributedDataParallel<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let vb = store.var_builder(DType::F32);
    linear(2, 2, vb.pp("forgotten"))?;
    let model = linear(2, 1, vb.pp("out"))?;
    let sgd = Sgd::new(0.1);
    let trainer = DistributedDataParallel::with_config(store, rank.comm(), sgd, config)?;
    Ok((model, trainer))
}

fn unused(rank: Rank) -> Result<()> {
    let (model, mut trainer) = half_used(&rank, DdpConfig::default())?;
    trainer.backward(&loss(&model)?)?;
    assert_eq!(
        trainer.step()?.unused,
        ["forgotten.weight", "forgotten.bias"]
    );
    Ok(())
}

fn no_gradient(rank: Rank) -> Result<()> {
    let mut config = DdpConfig::default();
    config.engine.unused_parameters = UnusedParameters::Error;
    let (model, mut trainer) = half_used(&rank, config)?;
    trainer.backward(&loss(&model)?)?;
    trainer.step().map(drop)
}

// --- It hangs, or ends with a time-out -------------------------------------------------------------------------------

fn rank_left(rank: Rank) -> Result<()> {
    let (model, mut trainer) = small(&rank)?;
    let batches = 3 - rank.rank(); // rank 1 has one batch less
    for _ in 0..batches {
        trainer.backward(&loss(&model)?)?;
        trainer.step()?;
    }
    Ok(())
}

fn timeout(rank: Rank) -> Result<()> {
    let (model, mut trainer) = small(&rank)?;
    if rank.rank() == 1 {
        std::thread::sleep(Duration::from_secs(3)); // reads from a slow disk, say
    }
    trainer.backward(&loss(&model)?)?;
    trainer.step().map(drop)
}

fn mismatch(rank: Rank) -> Result<()> {
    let (model, mut trainer) = small(&rank)?;
    trainer.backward(&loss(&model)?)?;
    if rank.rank() == 0 {
        trainer.clip_grad_norm(1.0)?; // on rank 0 only
    }
    trainer.step().map(drop)
}

fn failed_rank(rank: Rank) -> Result<()> {
    let (model, mut trainer) = small(&rank)?;
    if rank.rank() == 1 {
        return Err(Error::invalid("batch", "the file data-00017.bin is empty"));
    }
    trainer.backward(&loss(&model)?)?;
    trainer.step().map(drop)
}

// --- The replicas differ ---------------------------------------------------------------------------------------------

fn other_model(rank: Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let width = if rank.rank() == 0 { 8 } else { 16 };
    linear(2, width, store.var_builder(DType::F32).pp("hidden"))?;
    ddp(store, &rank).map(drop)
}

fn diverged(rank: Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let model = linear(2, 1, store.var_builder(DType::F32).pp("out"))?;
    let mut config = DdpConfig::default();
    config.engine.compare_replicas_every = 1;
    let sgd = Sgd::new(0.1);
    let mut trainer = DistributedDataParallel::with_config(store, rank.comm(), sgd, config)?;
    if rank.rank() == 1 {
        let bias = trainer.store().get("out.bias").expect("a layer has one");
        bias.write(0..1, &[1f32])?; // on rank 1 only
    }
    trainer.backward(&loss(&model)?)?;
    trainer.step().map(drop)
}

fn learning_rate(rank: Rank) -> Result<()> {
    let (model, mut trainer) = small(&rank)?;
    trainer.set_learning_rate(0.1 / (1 + rank.rank()) as f64);
    trainer.backward(&loss(&model)?)?;
    trainer.step().map(drop)
}

fn shared_varmap() -> Result<()> {
    let varmap = VarMap::new(); // outside of the closure
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    linear(2, 1, vb.pp("out"))?;
    World::threads(2)?.run(|rank| VarMapSync::new(&varmap, rank.comm()).map(drop))
}

fn altered(rank: Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let w = store.var_builder(DType::BF16).get(4, "w")?;
    let mut trainer = ddp(store, &rank)?;
    let param = trainer.store().get("w").expect("it was made above");
    param.write(0..4, &[2.0; 4])?;
    trainer.backward(&w.sum_all()?)?;
    trainer.step().map(drop)
}

// --- NaN -------------------------------------------------------------------------------------------------------------

/// What a metrics file says of a step that was skipped.
fn skipped() -> Result<String> {
    let said = World::threads(2)?.map(|rank| {
        let store = ParamStore::new(rank.device());
        let model = linear(2, 1, store.var_builder(DType::F32).pp("out"))?;
        let mut config = EngineConfig::default();
        config.non_finite = NonFinite::SkipStep;
        let adamw = AdamW::default();
        let mut trainer = dp_zero::trainer(Sharding::Zero1, store, rank.comm(), adamw, config)?;
        let factor = if rank.rank() == 1 { f64::NAN } else { 1.0 };
        trainer.backward(&(loss(&model)? * factor)?)?;
        let skipped = trainer.step()?.skipped.expect("a gradient is NaN");
        Ok::<_, Error>(skipped.to_string())
    })?;
    assert_eq!(said[0], said[1]);
    Ok(said[0].clone())
}

// --- More memory than planned ----------------------------------------------------------------------------------------

/// Parameters that are created in the reverse of the order in which the model uses them.
fn out_of_order(rank: Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let vb = store.var_builder(DType::F32);
    let mut layers = Vec::new();
    for i in (0..8).rev() {
        layers.insert(0, linear(8, 8, vb.pp(format!("layer{i}")))?);
    }
    let caps = BucketCaps::new(256)?;
    let config = ZeroConfig::stage(ZeroStage::Two).with_bucket_caps(caps);
    let mut trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::default(), config)?;
    let mut x = Tensor::ones((1, 8), DType::F32, rank.device())?;
    for layer in &layers {
        x = layer.forward(&x)?;
    }
    trainer.backward(&x.mean_all()?)?;
    trainer.step().map(drop)
}

// --- Calls that make no sense ----------------------------------------------------------------------------------------

fn stale_graph(rank: Rank) -> Result<()> {
    let (model, mut trainer) = small(&rank)?;
    let x = Tensor::ones((4, 2), DType::F32, &Device::Cpu)?;
    let state = model.forward(&x)?;
    trainer.backward(&state.mean_all()?)?;
    trainer.step()?;
    trainer.backward(&state.sqr()?.mean_all()?) // of before the step
}

fn plain_backward(rank: Rank) -> Result<()> {
    let (model, _trainer) = small(&rank)?;
    loss(&model)?.backward()?;
    Ok(())
}

fn two_backwards(rank: Rank) -> Result<()> {
    let (model, mut trainer) = small(&rank)?;
    trainer.backward(&loss(&model)?)?;
    trainer.backward(&loss(&model)?)
}

fn half_a_window(rank: Rank) -> Result<()> {
    let (model, mut trainer) = small(&rank)?;
    let mut window = trainer.accumulate(2)?;
    window.backward(&loss(&model)?)?;
    drop(window); // without finish
    trainer.step().map(drop)
}

fn late_parameter(rank: Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let vb = store.var_builder(DType::F32);
    linear(2, 1, vb.pp("out"))?;
    let _trainer = ddp(store, &rank)?;
    linear(2, 1, vb.pp("head"))?;
    Ok(())
}

fn mixed_dtypes(rank: Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let model = linear(2, 1, store.var_builder(DType::BF16).pp("out"))?;
    model.forward(&Tensor::ones((4, 2), DType::F32, rank.device())?)?;
    Ok(())
}

/// What the trainers have logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn take(&self) -> String {
        let mut bytes = self.0.lock().expect("no writer panics");
        String::from_utf8_lossy(&std::mem::take(&mut *bytes)).into_owned()
    }
}

impl Write for Log {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0
            .lock()
            .expect("no writer panics")
            .extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
