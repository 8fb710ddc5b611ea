//! From CUDA C to functions on a device: once per device and process.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, LazyLock};

use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction};
use candle_core::cuda_backend::cudarc::nvrtc::{
    CompileError, CompileOptions, Ptx, compile_ptx_with_opts,
};
use parking_lot::Mutex;

use super::sources::{Kernel, OPTIONS, SOURCES, Source};
use crate::error::{Error, Result};

/// The kernels of one device, and what it takes to launch them.
#[derive(Debug)]
pub(super) struct Functions {
    device: usize,
    num_multiprocessors: u32,
    by_kernel: HashMap<Kernel, CudaFunction>,
}

impl Functions {
    pub fn get(&self, kernel: Kernel) -> Result<&CudaFunction> {
        self.by_kernel.get(&kernel).ok_or_else(|| {
            let message = format!("no kernel `{}` in the sources", kernel.symbol());
            Error::cuda(self.device, "launch", message)
        })
    }

    pub fn num_multiprocessors(&self) -> u32 {
        self.num_multiprocessors
    }
}

/// What has been compiled in this process. It is never freed: a module belongs to the device's primary context, and the next
/// trainer on it needs the same one.
#[derive(Default)]
struct Cache {
    /// By compute capability: equal devices share the compiler's work.
    ptx: HashMap<(i32, i32), Vec<Ptx>>,
    /// By device number.
    functions: HashMap<usize, Arc<Functions>>,
}

static CACHE: LazyLock<Mutex<Cache>> = LazyLock::new(Mutex::default);

/// The kernels of a context's device. Other threads wait while the first one compiles.
pub(super) fn functions_of(context: &Arc<CudaContext>) -> Result<Arc<Functions>> {
    let device = context.ordinal();
    let cache = &mut *CACHE.lock();
    if let Some(functions) = cache.functions.get(&device) {
        return Ok(Arc::clone(functions));
    }
    let unknown = |e| Error::cuda(device, "cuDeviceGetAttribute", e);
    let capability = context.compute_capability().map_err(unknown)?;
    let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let num_multiprocessors = context.attribute(count).map_err(unknown)?.unsigned_abs();
    let ptx = match cache.ptx.entry(capability) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(new) => {
            let ptx = SOURCES.iter().map(|s| compile(device, s, capability));
            new.insert(ptx.collect::<Result<_>>()?)
        }
    };
    let mut by_kernel = HashMap::new();
    for (source, ptx) in SOURCES.iter().zip(ptx) {
        let failed = |what: &str, e| {
            let message = format!("{what} of {}: {e}", source.file);
            Error::cuda(device, "cuModuleLoadData", message)
        };
        let module = context
            .load_module(ptx.clone())
            .map_err(|e| failed("the module", e))?;
        for kernel in source.kernels() {
            let symbol = kernel.symbol();
            let function = module
                .load_function(&symbol)
                .map_err(|e| failed(&symbol, e))?;
            by_kernel.insert(kernel, function);
        }
    }
    let functions = Arc::new(Functions {
        device,
        num_multiprocessors,
        by_kernel,
    });
    cache.functions.insert(device, Arc::clone(&functions));
    Ok(functions)
}

fn compile(device: usize, source: &Source, (major, minor): (i32, i32)) -> Result<Ptx> {
    let mut options = vec![format!("--gpu-architecture=compute_{major}{minor}")];
    options.extend(OPTIONS.map(str::to_string));
    let options = CompileOptions {
        options,
        name: Some(source.file.to_string()),
        ..CompileOptions::default()
    };
    compile_ptx_with_opts(source.program(), options).map_err(|e| {
        let message = match e {
            CompileError::CompileError {
                nvrtc,
                options,
                log,
            } => {
                let log = log.to_string_lossy();
                let options = options.join(" ");
                format!(
                    "{} with `{options}`: {nvrtc:?}: {}",
                    source.file,
                    log.trim_end()
                )
            }
            other => format!("{}: {other:?}", source.file),
        };
        Error::cuda(device, "NVRTC", message)
    })
}
