//! Needs NVRTC's library, not a GPU, nor the feature `cuda`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr;

use libloading::Library;

use super::super::sources::{OPTIONS, SOURCES};

/// Compute capabilities to compile for, as far as the library knows them: V100, T4, A100, H100, B200, RTX 50.
const ARCHITECTURES: [c_int; 6] = [70, 75, 80, 90, 100, 120];

struct Nvrtc {
    library: Library,
    /// Found by NVRTC when it compiles, since it is loaded already.
    _builtins: Option<Library>,
}

impl Nvrtc {
    /// From `$CUDA_HOME` or `$CUDA_PATH`, the usual place, or wherever the loader looks.
    fn load() -> Option<Self> {
        let homes = ["CUDA_HOME", "CUDA_PATH"].map(std::env::var_os);
        let homes = homes.into_iter().flatten().map(PathBuf::from);
        let homes = homes.chain([PathBuf::from("/usr/local/cuda")]);
        let folders = homes.flat_map(|home| [home.join("lib64"), home.join("lib")]);
        for folder in folders.chain([PathBuf::new()]) {
            // SAFETY: the libraries have no initialisers but those of the C++ runtime.
            let load = |name: &str| unsafe { Library::new(folder.join(name).as_os_str()) };
            if let Ok(library) = load("libnvrtc.so") {
                return Some(Self {
                    library,
                    _builtins: load("libnvrtc-builtins.so").ok(),
                });
            }
        }
        None
    }

    /// Calls a function of NVRTC's C interface.
    fn call<F: Copy>(&self, name: &str, call: impl FnOnce(F) -> c_int) -> Result<(), c_int> {
        // SAFETY: the callers below give the types of `nvrtc.h`.
        let function = unsafe { self.library.get::<F>(name) };
        match call(*function.unwrap_or_else(|e| panic!("{name}: {e}"))) {
            0 => Ok(()),
            code => Err(code),
        }
    }

    fn architectures(&self) -> Vec<c_int> {
        type Get = unsafe extern "C" fn(*mut c_int) -> c_int;
        let mut count = 0;
        // SAFETY: it writes one number.
        let counted = self.call("nvrtcGetNumSupportedArchs", |f: Get| unsafe {
            f(&mut count)
        });
        let mut known = vec![0; count as usize];
        // SAFETY: it writes as many numbers as it has counted.
        let got = self.call("nvrtcGetSupportedArchs", |f: Get| unsafe {
            f(known.as_mut_ptr())
        });
        assert_eq!((counted, got), (Ok(()), Ok(())));
        known
    }

    /// The PTX, or the log.
    fn compile(&self, file: &str, text: &str, options: &[String]) -> Result<String, String> {
        type Program = *mut c_void;
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

        let c_string = |s: &str| CString::new(s).expect("no NUL in it");
        let (text, name) = (c_string(text), c_string(file));
        let options: Vec<CString> = options.iter().map(|o| c_string(o)).collect();
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = ptr::null_mut();
        let created = self.call("nvrtcCreateProgram", |f: Create| {
            let (text, name) = (text.as_ptr(), name.as_ptr());
            // SAFETY: two C strings, and no headers.
            unsafe { f(&mut program, text, name, 0, ptr::null(), ptr::null()) }
        });
        assert_eq!(created, Ok(()), "nvrtcCreateProgram of {file}");
        let compiled = self.call("nvrtcCompileProgram", |f: Compile| {
            // SAFETY: as many C strings as it is told.
            unsafe { f(program, options.len() as c_int, options.as_ptr()) }
        });
        let text_of = |size_of: &str, get: &str| {
            let mut size = 0;
            // SAFETY: it writes one number.
            let sized = self.call(size_of, |f: Size| unsafe { f(program, &mut size) });
            let mut text = vec![0 as c_char; size + 1];
            // SAFETY: it writes as many characters as it has said.
            let got = self.call(get, |f: Text| unsafe { f(program, text.as_mut_ptr()) });
            assert_eq!((sized, got), (Ok(()), Ok(())), "{get} of {file}");
            // SAFETY: the last character is NUL.
            unsafe { CStr::from_ptr(text.as_ptr()) }
                .to_string_lossy()
                .into_owned()
        };
        let result = match compiled {
            Ok(()) => Ok(text_of("nvrtcGetPTXSize", "nvrtcGetPTX")),
            Err(_) => Err(text_of("nvrtcGetProgramLogSize", "nvrtcGetProgramLog")),
        };
        // SAFETY: nobody uses the program any more.
        let destroyed = self.call("nvrtcDestroyProgram", |f: Destroy| unsafe {
            f(&mut program)
        });
        assert_eq!(destroyed, Ok(()));
        result
    }
}

/// Every kernel for several architectures, with nothing contracted or flushed to zero.
#[test]
fn nvrtc_compiles_every_kernel() {
    let Some(nvrtc) = Nvrtc::load() else {
        println!("skipped: no libnvrtc.so in $CUDA_HOME/lib64 or where the loader looks");
        return;
    };
    let known = nvrtc.architectures();
    let mut num_compiled = 0;
    for arch in ARCHITECTURES.iter().filter(|a| known.contains(a)) {
        let mut options = vec![format!("--gpu-architecture=compute_{arch}")];
        options.extend(OPTIONS.map(str::to_string));
        for source in &SOURCES {
            let ptx = nvrtc
                .compile(source.file, &source.program(), &options)
                .unwrap_or_else(|log| panic!("{} for {arch}:\n{log}", source.file));
            for kernel in source.kernels() {
                let entry = format!(".entry {}(", kernel.symbol());
                assert!(ptx.contains(&entry), "{arch}: no {entry}");
            }
            for word in ["fma.", ".ftz", ".approx"] {
                assert!(!ptx.contains(word), "{} for {arch} has {word}", source.file);
            }
            num_compiled += 1;
        }
    }
    println!("{num_compiled} compilations for {ARCHITECTURES:?}, of which NVRTC knows {known:?}");
    assert!(num_compiled > 0, "NVRTC knows none of {ARCHITECTURES:?}");
}

/// What a user would see: the compiler's log with file and line.
#[test]
fn errors_name_file_and_line() {
    let Some(nvrtc) = Nvrtc::load() else {
        println!("skipped: no libnvrtc.so in $CUDA_HOME/lib64 or where the loader looks");
        return;
    };
    let broken = SOURCES[0].program() + "__device__ int broken( {}";
    let log = nvrtc.compile(SOURCES[0].file, &broken, &[]).unwrap_err();
    assert!(log.contains("adamw.cu("), "{log}");
}
