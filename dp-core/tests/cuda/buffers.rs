//! Buffers, and values of parameters, in the memory of a GPU.

use candle_core::{DType, Device, DeviceLocation};
use candle_nn::Init;
use dp_core::memory::Category;
use dp_core::{Buffer, Ledger, ParamStore, Result};
use half::bf16;

use crate::harness::Test;

pub const TESTS: &[Test] = &[
    ("buffers: grow, shrink, copy, add", || {
        buffers().expect("works")
    }),
    ("buffers: exact bytes in the ledger", || {
        ledger().expect("works")
    }),
    ("parameters: values in place", || values().expect("works")),
    ("parameters: the same initial values as on the CPU", || {
        initial_values().expect("works")
    }),
];

fn gpu() -> Result<Device> {
    Ok(Device::new_cuda_with_stream(0)?)
}

fn buffers() -> Result<()> {
    let gpu = gpu()?;
    for dtype in [DType::F32, DType::F64, DType::I64, DType::U8, DType::BF16] {
        let b = Buffer::zeros_on(dtype, 7, &gpu)?;
        assert_eq!((b.dtype(), b.len()), (dtype, 7));
        assert_eq!(b.location(), DeviceLocation::Cuda { gpu_id: 0 });
    }
    let empty = Buffer::zeros_on(DType::F32, 0, &gpu)?;
    assert!(empty.to_vec::<f32>()?.is_empty());
    assert!(Buffer::zeros_on(DType::F8E4M3, 1, &gpu).is_err());

    // Through a parameter, since only these are written from the host.
    let store = ParamStore::new(&gpu);
    store
        .var_builder(DType::BF16)
        .get_with_hints(5, "w", Init::Const(256.0))?;
    let w = store.get("w").expect("was made");
    let mut sum = Buffer::zeros_on(DType::BF16, 5, &gpu)?;
    w.copy_to(0..5, &mut sum, 0)?;
    w.write(0..5, &[1.0, 2.0, 3.0, f32::NAN, -256.0])?;
    let mut other = Buffer::zeros_on(DType::BF16, 8, &gpu)?;
    w.copy_to(0..5, &mut other, 3)?;
    sum.add_from(&other, 3..8)?;
    let sums: Vec<f32> = sum.to_vec::<bf16>()?.iter().map(|x| x.to_f32()).collect();
    // 257 and 259 lie halfway between two numbers of bf16, and go to the even one.
    assert_eq!(sums[..3], [256.0, 258.0, 260.0]);
    assert!(sums[3].is_nan());
    assert_eq!(sums[4], 0.0);
    assert!(sum.as_slice::<bf16>().is_err(), "it is not at hand");
    assert!(sum.to_vec::<f32>().is_err(), "it is another type");

    other.resize(4)?;
    other.resize(6)?;
    let left: Vec<f32> = other.to_vec::<bf16>()?.iter().map(|x| x.to_f32()).collect();
    assert_eq!(left, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
    other.resize(100)?;
    assert_eq!(other.len(), 100);
    assert_eq!(other.to_vec::<bf16>()?[3], bf16::ONE);
    other.fill_zero(3..4)?;
    assert!(other.to_vec::<bf16>()?.iter().all(|x| *x == bf16::ZERO));
    Ok(())
}

fn ledger() -> Result<()> {
    let (gpu, ledger) = (gpu()?, Ledger::new());
    let b = Buffer::reserved_on(DType::F16, 5, &gpu, &ledger, Category::Communication)?;
    assert_eq!(ledger.current().communication, 10);
    drop(b);
    assert_eq!(ledger.current().communication, 0);
    // More than any GPU has: an error, which leaves nothing behind.
    let huge = Buffer::reserved_on(DType::F32, 1 << 45, &gpu, &ledger, Category::Gradients);
    assert!(huge.is_err());
    assert_eq!(ledger.current().gradients, 0);
    Ok(())
}

fn values() -> Result<()> {
    let store = ParamStore::new(&gpu()?);
    let vb = store.var_builder(DType::F32);
    let w = vb.get_with_hints((3, 4), "w", Init::Const(1.0))?;
    let param = store.get("w").expect("was made");
    param.write(4..6, &[5.0, -0.0])?;
    let mut read = [0.0; 4];
    param.read(3..7, &mut read)?;
    assert_eq!(
        read.map(f32::to_bits),
        [1.0, 5.0, -0.0, 1.0].map(f32::to_bits)
    );
    // The tensor that layers hold shows it, too.
    assert_eq!(w.to_vec2::<f32>()?[1], [5.0, -0.0, 1.0, 1.0]);
    let from_host = Buffer::from_vec(vec![9f32, 8.0, 7.0]);
    param.copy_from(0..2, &from_host, 1)?;
    assert_eq!(w.to_vec2::<f32>()?[0], [8.0, 7.0, 1.0, 1.0]);
    assert!(param.write(10..13, &[0.0; 3]).is_err());
    Ok(())
}

fn initial_values() -> Result<()> {
    let digest = |device: &Device, dtype| -> Result<String> {
        let store = ParamStore::new(device).with_seed(7);
        candle_nn::linear(33, 65, store.var_builder(dtype).pp("fc"))?;
        candle_nn::batch_norm(65, 1e-5, store.var_builder(dtype).pp("bn"))?;
        store.sha256()
    };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        assert_eq!(digest(&gpu()?, dtype)?, digest(&Device::Cpu, dtype)?);
    }
    Ok(())
}
