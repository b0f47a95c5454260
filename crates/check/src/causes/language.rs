//! The language of a kernel, in whose words a cure is said.

use std::borrow::Cow;

use crate::sources::SourceLine;

/// A language of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelLanguage {
    Cuda,
    /// Triton, whose programs have no threads to be ordered.
    Triton,
    Numba,
    CuteDsl,
}

impl KernelLanguage {
    /// The language of a line in a module with this PTX. Languages of Python differ by the names of entries:
    /// numba-cuda mangles them as C++ does, and the CuTe DSL puts its own name before them.
    pub fn of(source: Option<&SourceLine>, ptx: &[&str]) -> KernelLanguage {
        if !source.is_some_and(|source| source.file.ends_with(".py")) {
            return KernelLanguage::Cuda;
        }
        let mut names = ptx.iter().filter_map(|line| line.split_once(".entry ")).map(|(_, name)| name);
        match names.next() {
            Some(name) if name.starts_with("_Z") => KernelLanguage::Numba,
            Some(name) if name.starts_with("kernel_cutlass_") => KernelLanguage::CuteDsl,
            _ => KernelLanguage::Triton,
        }
    }

    /// The cure where two threads, or two programs of Triton, store to one element.
    pub const fn cure_of_overwrite(self) -> &'static str {
        match self {
            KernelLanguage::Triton => {
                "let one program store each element: where a mask leaves out a bound, the offsets of the last block \
                 reach elements of another row and its program; else use tl.atomic_add (or another tl.atomic_…), or \
                 two launches"
            }
            _ => {
                "let one thread write each element: where a bound is missing, the index of the last tile reaches an \
                 element of another row and its CTA; else use an atomic, or two launches"
            }
        }
    }

    /// A cure for CUDA C++ with the functions of this language.
    pub fn words(self, cure: &'static str) -> Cow<'static, str> {
        let words: &[(&str, &str)] = match self {
            KernelLanguage::Cuda | KernelLanguage::Triton => &[],
            KernelLanguage::Numba => &[
                ("__sync", "cuda.sync"),
                ("__threadfence()", "cuda.threadfence()"),
                ("use an atomic", "use cuda.atomic"),
            ],
            KernelLanguage::CuteDsl => &[
                ("__syncthreads()", "cute.arch.sync_threads()"),
                ("__syncwarp()", "cute.arch.sync_warp()"),
                ("__threadfence()", "cute.arch.fence_acq_rel_gpu()"),
                ("use an atomic", "use cute.arch.atomic_add (or another atomic)"),
            ],
        };
        words.iter().fold(Cow::Borrowed(cure), |said, (cuda, own)| {
            if said.contains(cuda) { Cow::Owned(said.replace(cuda, own)) } else { said }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cure_speaks_the_language_of_the_kernel() {
        let line = |file: &str| SourceLine { file: file.to_owned(), ..SourceLine::default() };
        let barrier = "put __syncthreads() between the two accesses";
        for (file, entry, language, said) in [
            ("a.cu", "_Z3sumPf", KernelLanguage::Cuda, "__syncthreads()"),
            ("a.py", "sum_kernel(", KernelLanguage::Triton, "__syncthreads()"),
            ("a.py", "_ZN6cudapy3sum(", KernelLanguage::Numba, "cuda.syncthreads()"),
            ("a.py", "kernel_cutlass_sum_0(", KernelLanguage::CuteDsl, "cute.arch.sync_threads()"),
        ] {
            let ptx = format!(".visible .entry {entry}");
            let found = KernelLanguage::of(Some(&line(file)), &[".version 8.0", &ptx]);
            assert_eq!(found, language);
            assert!(found.words(barrier).contains(said), "{}", found.words(barrier));
        }
    }
}
