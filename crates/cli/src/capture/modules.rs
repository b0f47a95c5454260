//! Finds the PTX of a recorded kernel: in the image of its module, else beside an equal cubin in the caches
//! of Triton and Inductor, else in the files that the user names.

use std::path::{Path, PathBuf};

use capture::Record;
use capture::fatbin::{self, ImageError};

/// Why the PTX of a kernel is not known.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    #[error(
        "{0}; neither Triton's caches nor --ptx have it. Name the PTX that its compiler wrote with --ptx, or \
         compile the kernel with PTX (nvcc: -gencode arch=compute_90,code=compute_90)"
    )]
    NoPtx(ImageError),
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
}

pub struct Modules<'a> {
    records: &'a Path,
    given: &'a [PathBuf],
}

impl<'a> Modules<'a> {
    pub fn new(records: &'a Path, given: &'a [PathBuf]) -> Modules<'a> {
        Modules { records, given }
    }

    /// The PTX of a kernel.
    pub fn ptx(&self, record: &Record) -> Result<String, ModuleError> {
        let path = self.records.join(&record.image);
        let image = std::fs::read(&path).map_err(|source| ModuleError::Read { path, source })?;
        let error = match fatbin::ptx(&image, record.capability) {
            Ok(text) => return Ok(text),
            Err(error) => error,
        };
        let entry = |text: &String| {
            let mut entries = text.split(".entry").skip(1);
            entries.any(|rest| {
                let rest = rest.trim_start().strip_prefix(record.kernel.as_str());
                rest.is_some_and(|rest| {
                    !rest.starts_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '$'))
                })
            })
        };
        let beside = self.folders().into_iter().find_map(|folder| {
            let twin = find(&folder, &mut |path| has_extension(path, "cubin") && is_equal(path, &image))?;
            std::fs::read_to_string(twin.with_extension("ptx")).ok().filter(entry)
        });
        let named = || {
            self.given.iter().find_map(|path| {
                let is_text = |path: &Path| {
                    has_extension(path, "ptx") && std::fs::read_to_string(path).is_ok_and(|text| entry(&text))
                };
                std::fs::read_to_string(find(path, &mut { is_text })?).ok()
            })
        };
        beside.or_else(named).ok_or(ModuleError::NoPtx(error))
    }

    /// The folders in which a compiler may have left an equal cubin.
    fn folders(&self) -> Vec<PathBuf> {
        let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let home = variable("TRITON_HOME").or_else(|| variable("HOME"));
        let user = std::env::var("USER").unwrap_or_else(|_| "root".to_owned());
        let inductor = std::env::temp_dir().join(format!("torchinductor_{user}"));
        let caches = [
            variable("TRITON_CACHE_DIR"),
            home.map(|home| home.join(".triton/cache")),
            variable("TORCHINDUCTOR_CACHE_DIR"),
            Some(inductor),
        ];
        self.given.iter().cloned().chain(caches.into_iter().flatten()).collect()
    }
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found == extension)
}

fn is_equal(path: &Path, image: &[u8]) -> bool {
    let size = std::fs::metadata(path).map(|meta| meta.len());
    size.is_ok_and(|size| size == image.len() as u64) && std::fs::read(path).is_ok_and(|bytes| bytes == image)
}

/// The first file below a path, in the order of names, that is accepted.
fn find(path: &Path, accepted: &mut dyn FnMut(&Path) -> bool) -> Option<PathBuf> {
    let Ok(entries) = std::fs::read_dir(path) else {
        return (path.is_file() && accepted(path)).then(|| path.to_path_buf());
    };
    // A link to a folder could lead back.
    let inside = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_symlink()));
    let mut inside: Vec<PathBuf> = inside.map(|entry| entry.path()).collect();
    inside.sort();
    inside.iter().find_map(|path| find(path, accepted))
}
