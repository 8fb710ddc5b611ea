use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
use candle_nn::{Init, VarBuilder};
use dp_core::{Backend, Error, Ledger, ParamStore, Rank, Result, World, WorldError};

/// The longest that a whole test of ranks may take before it counts as a hang.
pub const HANG: Duration = Duration::from_secs(30);

/// The longest that a rank waits in a collective, unless a test says otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Runs `body` on a thread of its own and panics when it has not ended within `limit`: a hang becomes a failure.
pub fn guarded<R: Send + 'static>(limit: Duration, body: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, finished) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        // The receiver is gone only if the test has failed by deadline.
        let _ = done.send(body());
    });
    match finished.recv_timeout(limit) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("hangs: not finished after {limit:?}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("the thread sends before it ends"),
        },
    }
}

/// A world for tests: one thread per rank, a short timeout.
pub fn world(world_size: usize) -> World {
    World::threads(world_size)
        .expect("a positive world size")
        .with_timeout(TIMEOUT)
        .with_threads_per_rank(1)
}

/// Runs `f` on `world_size` ranks under the hang guard and returns what they return, in rank order.
pub fn ranks<T, F>(world_size: usize, f: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
{
    ranks_of(world(world_size), f)
}

/// Like [`ranks`] for any world.
pub fn ranks_of<T, F>(world: World, f: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
{
    let results: Arc<Mutex<Vec<Option<T>>>> = Arc::default();
    results
        .lock()
        .expect("not poisoned")
        .resize_with(world.world_size(), || None);
    let slots = Arc::clone(&results);
    let run = run_guarded(
        world,
        Box::new(move |rank| {
            let index = rank.rank();
            let result = f(rank)?;
            slots.lock().expect("not poisoned")[index] = Some(result);
            Ok(())
        }),
    );
    run.unwrap_or_else(|e| panic!("{e}"));
    let results = std::mem::take(&mut *results.lock().expect("not poisoned"));
    results
        .into_iter()
        .map(|r| r.expect("no rank failed"))
        .collect()
}

/// Runs ranks that are expected to fail.
pub fn failing_ranks<F>(world: World, f: F) -> WorldError
where
    F: Fn(Rank) -> Result<()> + Send + Sync + 'static,
{
    match run_guarded(world, Box::new(f)) {
        Err(Error::World(e)) => Arc::into_inner(e).expect("nobody else holds the error"),
        Err(other) => panic!("expected a WorldError, got {other}"),
        Ok(()) => panic!("expected a failure"),
    }
}

/// The one place where tests run a world: not generic, so that it is compiled once.
fn run_guarded(world: World, f: Box<dyn Fn(Rank) -> Result<()> + Send + Sync>) -> Result<()> {
    guarded(HANG, move || world.run(f))
}

/// The same ranks on both backends.
pub fn both_backends(world_size: usize) -> [World; 2] {
    [Backend::SharedMemory, Backend::Naive].map(|b| world(world_size).with_backend(b))
}

/// Runs `body` in a process of its own with the additional environment `env`, so that it has environment, threads and
/// heap to itself: `test` is the full name of the calling test, which the process runs again, and only it. A test may
/// call this several times with different `env`.
pub fn isolated(test: &str, env: &[(&str, &str)], body: impl FnOnce()) {
    const CHILD: &str = "DP_CORE_ISOLATED_TEST";
    const RAN: &str = "the isolated body has run";
    let key = format!("{test} {env:?}");
    if let Ok(child) = std::env::var(CHILD) {
        if child == key {
            body();
            println!("{RAN}");
        }
        return;
    }
    let binary = std::env::current_exe().expect("a test binary knows where it is");
    let mut command = Command::new(binary);
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(CHILD, key).envs(env.iter().copied());
    let output =
        guarded(2 * HANG, move || command.output()).expect("the test binary can be run again");
    let text = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && text.contains(RAN);
    assert!(passed, "{text}{}", String::from_utf8_lossy(&output.stderr));
}

/// Panics unless `result` is an error whose text contains all of `parts`; returns it.
#[track_caller]
pub fn expect_error<T>(result: Result<T>, parts: &[&str]) -> Error {
    match result {
        Ok(_) => panic!("expected an error with {parts:?}"),
        Err(error) => {
            let text = error.to_string();
            for part in parts {
                assert!(text.contains(part), "no {part:?} in {text:?}");
            }
            error
        }
    }
}

/// A f32 builder over `store`.
pub fn builder(store: &ParamStore) -> VarBuilder<'static> {
    store.var_builder(DType::F32)
}

/// A parameter of the probe model: starts at 1.0 everywhere.
pub fn ones(vb: &VarBuilder, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
    Ok(vb.get_with_hints(shape.into(), name, Init::Const(1.0))?)
}

/// `sum(w) * g`: a loss whose gradient for each element of `w` is `g`.
pub fn linear_loss(w: &Tensor, g: f64) -> Result<Tensor> {
    Ok((w.sum_all()? * g)?)
}

/// All elements of a tensor, in row-major order.
pub fn values(t: &Tensor) -> Vec<f32> {
    t.flatten_all()
        .and_then(|t| t.to_vec1())
        .expect("an f32 tensor on the CPU")
}

/// The identity, which runs a closure in the middle of backward.
pub struct Probe<F>(pub F);

impl<F: Fn() + Send + Sync> CustomOp1 for Probe<F> {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((s.clone(), l.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        (self.0)();
        Ok(Some(grad.clone()))
    }
}

/// A small generator of reproducible numbers.
#[derive(Clone)]
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0xd1b5_4a32_d192_ed03)
    }

    /// The next number (splitmix64).
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// In [-1, 1), with all mantissa bits in use.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit() as f32).collect()
    }

    pub fn tensor(&mut self, shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        let v = self.floats(shape.elem_count());
        Tensor::from_vec(v, shape, &candle_core::Device::Cpu)
            .expect("as many values as the shape has")
    }
}

/// Waits until no collective keeps memory of `ledger` any more, with a deadline; `between` two looks.
pub fn wait_until_freed(ledger: &Ledger, between: impl Fn()) {
    let start = Instant::now();
    while ledger.current().communication > 0 {
        let left = ledger.current();
        assert!(start.elapsed() < Duration::from_secs(5), "{left:?}");
        between();
    }
}
