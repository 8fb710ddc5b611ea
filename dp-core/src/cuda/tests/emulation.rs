//! The kernels on the host: the very sources, compiled by the system's C++ compiler.

use std::fmt::Write;
use std::process::Command;
use std::sync::LazyLock;

use libloading::Library;

use super::super::sources::{Kernel, SOURCES};

/// Blocks and threads of a launch: 48 elements at a time, so that short slices leave threads without work, and long ones take
/// several turns.
const BLOCKS: u32 = 3;
const THREADS: u32 = 4;

/// The compiled kernels.
pub(super) struct Emulation {
    library: Library,
}

impl Emulation {
    /// Compiles the kernels, once per process. `None`, and a message, where there is no C++ compiler.
    pub fn get() -> Option<&'static Self> {
        static EMULATION: LazyLock<Option<Emulation>> = LazyLock::new(Emulation::compile);
        EMULATION.as_ref()
    }

    fn compile() -> Option<Self> {
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_string());
        if Command::new(&compiler).arg("--version").output().is_err() {
            println!("skipped: no C++ compiler `{compiler}`; install one, or set CXX");
            return None;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (source, library) = (
            folder.path().join("kernels.cpp"),
            folder.path().join("kernels.so"),
        );
        std::fs::write(&source, program()).expect("the source is written");
        // Nothing is contracted or reordered, as NVRTC is told.
        let output = Command::new(&compiler)
            .args(["-std=c++17", "-O1", "-ffp-contract=off", "-fno-fast-math"])
            .args(["-fno-strict-aliasing", "-pthread", "-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .output()
            .expect("the compiler runs");
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{compiler}: {log}");
        // SAFETY: the library has no initialisers but those of the C++ runtime.
        let library = unsafe { Library::new(library.as_os_str()) }.expect("the library loads");
        Some(Self { library })
    }

    /// Runs a kernel as a launch does.
    ///
    /// # Safety
    /// As `Kernels::launch`, with addresses of the host.
    pub unsafe fn launch<A: Copy>(&self, kernel: Kernel, args: &A) {
        let symbol = kernel.symbol();
        type Size = unsafe extern "C" fn() -> usize;
        type Launch<A> = unsafe extern "C" fn(u32, u32, *const A);
        // SAFETY: `program` has defined both with these types.
        let (size, launch) = unsafe {
            let size = self.library.get::<Size>(format!("size_{symbol}"));
            let launch = self.library.get::<Launch<A>>(format!("launch_{symbol}"));
            (size.expect("a kernel"), launch.expect("a kernel"))
        };
        // SAFETY: it takes nothing.
        let size = unsafe { size() };
        assert_eq!(size, size_of::<A>(), "the arguments of {symbol}");
        // One launch at a time: the grid's size and shared memory are static in the emulation.
        static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let guard = ONE.lock().unwrap_or_else(|e| e.into_inner());
        // SAFETY: the caller's promise; `args` has the kernel's type.
        unsafe { launch(BLOCKS, THREADS, args) };
        drop(guard);
    }
}

fn program() -> String {
    let mut text = include_str!("emulation.h").to_string();
    for source in &SOURCES {
        text += &source.program();
        for kernel in source.kernels() {
            let name = kernel.symbol();
            let _ = writeln!(
                text,
                "extern \"C\" size_t size_{name}() {{ return size_of_args({name}); }}\n\
                 extern \"C\" void launch_{name}(u32 blocks, u32 threads, const void *args) {{ \
                 emulate({name}, blocks, threads, args); }}"
            );
        }
    }
    text
}
