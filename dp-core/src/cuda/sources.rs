//! The CUDA sources, the kernels in them, and how NVRTC compiles them.

use candle_core::DType;

/// Options for NVRTC beside the architecture. Without them it contracts products and sums to fused operations; the others are
/// NVRTC's defaults, said for whoever reads the result. IEEE rounding is what makes a GPU's bits the host's.
pub(super) const OPTIONS: [&str; 5] = [
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--std=c++17",
];

const COMMON: &str = include_str!("kernels/common.cuh");

/// One file of kernels.
pub(super) struct Source {
    /// The file's name, for messages.
    pub file: &'static str,
    text: &'static str,
    /// The kernels in it, each once per dtype or pair of dtypes.
    families: &'static [Family],
}

pub(super) const SOURCES: [Source; 6] = [
    Source {
        file: "adamw.cu",
        text: include_str!("kernels/adamw.cu"),
        families: &[Family("adamw", Types::FloatPairs)],
    },
    Source {
        file: "sgd.cu",
        text: include_str!("kernels/sgd.cu"),
        families: &[Family("sgd", Types::FloatPairs)],
    },
    Source {
        file: "convert.cu",
        text: include_str!("kernels/convert.cu"),
        families: &[Family("convert", Types::FloatPairs)],
    },
    Source {
        file: "gradient.cu",
        text: include_str!("kernels/gradient.cu"),
        families: &[
            Family("max_abs", Types::Floats),
            Family("sum_of_squares", Types::Floats),
            Family("find_non_finite", Types::Floats),
        ],
    },
    Source {
        file: "masters.cu",
        text: include_str!("kernels/masters.cu"),
        families: &[
            Family("find_altered", Types::Floats),
            Family("refresh_altered", Types::Floats),
        ],
    },
    Source {
        file: "reduce.cu",
        text: include_str!("kernels/reduce.cu"),
        families: &[Family("reduce", Types::Elements)],
    },
];

impl Source {
    /// What the compiler gets: NVRTC has no files to include.
    pub fn program(&self) -> String {
        let (file, text) = (self.file, self.text);
        format!("#line 1 \"common.cuh\"\n{COMMON}\n#line 1 \"{file}\"\n{text}")
    }

    /// All kernels of the file.
    pub fn kernels(&self) -> impl Iterator<Item = Kernel> {
        self.families.iter().flat_map(|Family(name, types)| {
            let of = |dtype, second| Kernel {
                name,
                dtype,
                second,
            };
            match types {
                Types::Floats => FLOATS.iter().map(|t| of(*t, None)).collect(),
                Types::Elements => ELEMENTS.iter().map(|t| of(*t, None)).collect(),
                Types::FloatPairs => {
                    let pairs = FLOATS
                        .iter()
                        .flat_map(|a| FLOATS.iter().map(|b| (*a, Some(*b))));
                    pairs.map(|(a, b)| of(a, b)).collect::<Vec<_>>()
                }
            }
        })
    }
}

/// A kernel template and its types.
struct Family(&'static str, Types);

enum Types {
    /// What is trained: f32, f16, bf16.
    Floats,
    /// All pairs of these.
    FloatPairs,
    /// All that a buffer can hold.
    Elements,
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

const ELEMENTS: [DType; 7] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::U8,
    DType::U32,
    DType::I64,
];

/// One kernel: `adamw` of f16 gradients and f32 parameters is `adamw_f16_f32` in the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Kernel {
    name: &'static str,
    dtype: DType,
    second: Option<DType>,
}

impl Kernel {
    /// A kernel of one dtype.
    pub fn of(name: &'static str, dtype: DType) -> Self {
        Self {
            name,
            dtype,
            second: None,
        }
    }

    /// A kernel of two.
    pub fn of_pair(name: &'static str, dtype: DType, second: DType) -> Self {
        Self {
            name,
            dtype,
            second: Some(second),
        }
    }

    /// Its name in the source.
    pub fn symbol(&self) -> String {
        let first = self.dtype.as_str();
        match self.second {
            Some(second) => format!("{}_{first}_{}", self.name, second.as_str()),
            None => format!("{}_{first}", self.name),
        }
    }
}
