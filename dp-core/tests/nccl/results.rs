//! The results of every collective. Sums are of small integers, so they are exact in any order.

use candle_core::DType;
use dp_core::comm::{Collective, Request};
use dp_core::{Buffer, Element, ParamStore, Rank, ReduceOp, Result};
use half::{bf16, f16};

/// On buffers of every type in the host's memory, and on those of floats in the GPU's.
pub fn are_right(rank: &Rank) -> Result<()> {
    collectives::<f32>(rank)?;
    collectives::<f64>(rank)?;
    collectives::<f16>(rank)?;
    collectives::<bf16>(rank)?;
    collectives::<u8>(rank)?;
    collectives::<u32>(rank)?;
    collectives::<i64>(rank)?;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        on_the_gpu(rank, dtype)?;
    }
    Ok(())
}

/// An element type with small integers.
trait Sample: Element + PartialEq {
    /// From 1 to the next number; 0 for integers.
    const EPSILON: f64;
    fn of(value: usize) -> Self;
    fn number(self) -> f64;
}

macro_rules! sample {
    ($t:ty, $epsilon:expr, $of:expr, $number:expr) => {
        impl Sample for $t {
            const EPSILON: f64 = $epsilon;
            fn of(value: usize) -> Self {
                $of(value)
            }
            fn number(self) -> f64 {
                $number(self)
            }
        }
    };
}
sample!(f32, f32::EPSILON as f64, |v| v as f32, f64::from);
sample!(f64, f64::EPSILON, |v| v as f64, |x| x);
sample!(
    f16,
    f16::EPSILON.to_f64_const(),
    |v| f16::from_f32(v as f32),
    f64::from
);
sample!(
    bf16,
    bf16::EPSILON.to_f64_const(),
    |v| bf16::from_f32(v as f32),
    f64::from
);
sample!(u8, 0.0, |v| v as u8, f64::from);
sample!(u32, 0.0, |v| v as u32, f64::from);
sample!(i64, 0.0, |v| v as i64, |x| x as f64);

/// Element `i` of rank `r`'s buffer.
fn value(r: usize, i: usize) -> usize {
    (i % 5) + 2 * r
}

/// What element `i` of rank `me` must be after the collective; `None` where it is unspecified.
fn expected(collective: Collective, me: usize, n: usize, len: usize, i: usize) -> Option<usize> {
    let all = (0..n).map(|r| value(r, i));
    let reduced = |op| match op {
        ReduceOp::Sum => all.clone().sum(),
        // The mean of 2 r is n - 1.
        ReduceOp::Mean => (i % 5) + n - 1,
        ReduceOp::Max => all.clone().max().unwrap_or(0),
        _ => all.clone().min().unwrap_or(0),
    };
    let slice = (len / n).max(1);
    match collective {
        Collective::AllReduce(op) => Some(reduced(op)),
        Collective::ReduceScatter(op) => (i / slice == me).then(|| reduced(op)),
        Collective::AllGather => Some(value(i / slice, i)),
        Collective::Broadcast { root } => Some(value(root, i)),
        _ => None,
    }
}

/// `ncclAvg` multiplies each number by 1/n before the sum, and only for powers of 2 is that no rounding.
fn assert_right(collective: Collective, n: usize, epsilon: f64, got: f64, value: usize, i: usize) {
    let rounds = match collective {
        Collective::AllReduce(op) | Collective::ReduceScatter(op) => op == ReduceOp::Mean,
        _ => false,
    };
    let tolerance = match rounds && !n.is_power_of_two() {
        true => n as f64 * epsilon * value as f64,
        false => 0.0,
    };
    let value = value as f64;
    assert!(
        (got - value).abs() <= tolerance,
        "{collective}: {got} instead of {value}, element {i}"
    );
}

fn kinds(n: usize, is_float: bool) -> Vec<Collective> {
    let ops = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Mean];
    let ops = &ops[..if is_float { 4 } else { 3 }];
    let mut kinds = vec![
        Collective::AllGather,
        Collective::Broadcast { root: 0 },
        Collective::Broadcast { root: n - 1 },
    ];
    kinds.extend(ops.iter().map(|op| Collective::AllReduce(*op)));
    kinds.extend(ops.iter().map(|op| Collective::ReduceScatter(*op)));
    kinds
}

/// Every collective on buffers of the host.
fn collectives<T: Sample>(rank: &Rank) -> Result<()> {
    let (comm, me, n) = (rank.comm(), rank.rank(), rank.world_size());
    for len in [0, n, 60 * n, 30_000 * n] {
        for collective in kinds(n, T::EPSILON > 0.0) {
            let mine: Vec<T> = (0..len).map(|i| T::of(value(me, i))).collect();
            let request = Request::new(collective, "host");
            let result = comm.start(request, Buffer::from_vec(mine))?.wait()?;
            for (i, got) in result.as_slice::<T>()?.iter().enumerate() {
                if let Some(value) = expected(collective, me, n, len, i) {
                    assert_right(collective, n, T::EPSILON, got.number(), value, i);
                }
            }
        }
    }
    Ok(())
}

/// A buffer on the rank's GPU, computed there.
pub fn on_gpu(rank: &Rank, values: &[f32], dtype: DType) -> Result<Buffer> {
    let store = ParamStore::new(rank.device());
    let vb = store.var_builder(dtype);
    vb.get_with_hints(values.len(), "x", candle_nn::Init::Const(0.0))?;
    let param = store.get("x").expect("was made");
    param.write(0..values.len(), values)?;
    let mut buffer = Buffer::zeros_on(dtype, values.len(), rank.device())?;
    param.copy_to(0..values.len(), &mut buffer, 0)?;
    Ok(buffer)
}

pub fn floats(buffer: &Buffer) -> Result<Vec<f32>> {
    Ok(match buffer.dtype() {
        DType::F16 => buffer.to_vec::<f16>()?.iter().map(|v| v.to_f32()).collect(),
        DType::BF16 => buffer
            .to_vec::<bf16>()?
            .iter()
            .map(|v| v.to_f32())
            .collect(),
        _ => buffer.to_vec::<f32>()?,
    })
}

/// Every collective in place, right behind the kernels that write the buffer, and read right after.
fn on_the_gpu(rank: &Rank, dtype: DType) -> Result<()> {
    let (comm, me, n) = (rank.comm(), rank.rank(), rank.world_size());
    let epsilon = match dtype {
        DType::F16 => <f16 as Sample>::EPSILON,
        DType::BF16 => <bf16 as Sample>::EPSILON,
        _ => <f32 as Sample>::EPSILON,
    };
    for len in [n, 1000 * n, 100_000 * n] {
        let mine: Vec<f32> = (0..len).map(|i| value(me, i) as f32).collect();
        for collective in kinds(n, true) {
            let buffer = on_gpu(rank, &mine, dtype)?;
            let result = comm
                .start(Request::new(collective, "GPU"), buffer)?
                .wait()?;
            for (i, got) in floats(&result)?.into_iter().enumerate() {
                if let Some(value) = expected(collective, me, n, len, i) {
                    assert_right(collective, n, epsilon, f64::from(got), value, i);
                }
            }
        }
    }
    Ok(())
}
