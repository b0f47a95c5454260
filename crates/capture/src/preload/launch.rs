//! Records of launches.

use std::cell::Cell;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::copy::Copier;
use crate::driver::{self, Handle, Status};
use crate::params;
use crate::state::{CapturedFunction, State, TensorMap, note};

/// A launch as the program makes it.
pub struct Launch {
    pub function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    shared: u32,
    cooperative: bool,
    stream: Handle,
    /// The addresses of the parameters; null where `extra` has them.
    pub params: *const *const u8,
    pub extra: *const *const c_void,
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    attributes: *const Attribute,
    count: u32,
}

/// `CUlaunchAttribute`: the identity, and the value from byte 8 on.
#[repr(C)]
struct Attribute {
    identity: u32,
    padding: u32,
    value: [u32; 16],
}

impl Launch {
    pub fn of(
        function: Handle,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        stream: Handle,
        params: *const *const u8,
        extra: *const *const c_void,
    ) -> Launch {
        Launch { function, grid, block, cluster: [1; 3], shared, cooperative: false, stream, params, extra }
    }

    /// A launch all of whose CTAs are resident together.
    pub fn cooperative(self) -> Launch {
        Launch { cooperative: true, ..self }
    }

    /// # Safety
    /// The configuration must be that of a launch.
    pub unsafe fn of_config(
        config: *const Config,
        function: Handle,
        params: *const *const u8,
        extra: *const *const c_void,
    ) -> Launch {
        // SAFETY: as the caller guarantees.
        let config = unsafe { &*config };
        let mut launch =
            Launch::of(function, config.grid, config.block, config.shared, config.stream, params, extra);
        for at in 0..config.count as usize {
            // SAFETY: the array has this number of attributes.
            let attribute = unsafe { &*config.attributes.add(at) };
            match attribute.identity {
                // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
                2 => launch.cooperative = attribute.value[0] != 0,
                // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                4 => launch.cluster.copy_from_slice(&attribute.value[..3]),
                _ => {}
            }
        }
        launch
    }

    /// Whether the launch goes into a graph. The query of a stream that must not be used during a capture
    /// fails.
    fn is_in_graph(&self) -> bool {
        let mut status = 0;
        // SAFETY: the stream is that of the launch, and the address that of a variable.
        unsafe { driver::is_capturing(self.stream, &mut status) }.is_err() || status != 0
    }
}

thread_local! {
    /// Whether this thread is inside a launch. A driver may make one launch by another of its functions.
    static LAUNCHING: Cell<bool> = const { Cell::new(false) };
}

/// Makes the launch by `call`, and records it if it is selected.
pub fn launched(launch: Launch, call: impl FnOnce() -> Status) -> Status {
    if LAUNCHING.replace(true) {
        return call();
    }
    let status = recorded(&launch, call);
    LAUNCHING.set(false);
    status
}

fn recorded(launch: &Launch, call: impl FnOnce() -> Status) -> Status {
    let recording = note(|state| {
        let (function, number) = state.count(launch.function)?;
        Recording::begin(state, launch, &function, number)
    });
    let status = call();
    if let Some(Some(recording)) = recording {
        note(|_| recording.end(status));
    }
    status
}

/// Memory that the launch may use.
struct Buffer {
    address: u64,
    bytes: usize,
}

/// The record of a launch that is not made yet.
struct Recording {
    folder: PathBuf,
    /// The first part of the record.
    head: String,
    buffers: Vec<Buffer>,
    in_graph: bool,
    after: bool,
    refused: Option<String>,
}

impl Recording {
    fn begin(
        state: &mut State,
        launch: &Launch,
        function: &CapturedFunction,
        number: u64,
    ) -> Option<Recording> {
        let all = state.selection.folder.clone()?;
        state.records += 1;
        let folder = all.join(format!("{}-{}", std::process::id(), state.records));
        std::fs::create_dir_all(&folder).ok()?;
        let in_graph = launch.is_in_graph();
        let mut recording = Recording {
            folder,
            head: String::new(),
            buffers: Vec::new(),
            in_graph,
            after: false,
            refused: None,
        };
        // SAFETY: the program makes this launch.
        let params = unsafe { params::bytes(function, launch) };
        let params = params.unwrap_or_else(|why| {
            recording.refused = Some(why);
            Vec::new()
        });
        let image = save_image(&all, function).unwrap_or_else(|why| {
            recording.refused.get_or_insert(why);
            String::new()
        });
        recording.head = head(launch, function, number, in_graph, &image, &params, &maps(state, &params));
        if recording.refused.is_none()
            && let Err(why) = recording.save(&params, &maps(state, &params), state.selection.limit)
        {
            recording.refused = Some(why);
        }
        recording.after = state.selection.after && !in_graph && recording.refused.is_none();
        Some(recording)
    }

    /// Copies the memory that the parameters reach.
    fn save(
        &mut self,
        params: &[Vec<u8>],
        maps: &[(usize, usize, TensorMap)],
        limit: usize,
    ) -> Result<(), String> {
        let mut copier = Copier::new()?;
        if !self.in_graph {
            copier.wait()?;
        }
        let words = params.iter().flat_map(|param| param.chunks_exact(8));
        let mut addresses: Vec<u64> =
            words.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect();
        addresses.extend(maps.iter().map(|(_, _, map)| map.address));
        let mut total = 0usize;
        while let Some(address) = addresses.pop() {
            let known = |buffer: &Buffer| {
                address.checked_sub(buffer.address).is_some_and(|at| at < buffer.bytes as u64)
            };
            // No allocation is below 4 GiB or beyond 57 bits: most numbers need no question to the driver.
            if !(1 << 32..1 << 57).contains(&address) || self.buffers.iter().any(known) {
                continue;
            }
            let Some((start, bytes)) = driver::allocation(address) else { continue };
            total = total.saturating_add(bytes);
            if total > limit {
                return Err(format!("its memory has {total} bytes or more, and --limit is {limit}"));
            }
            let file = self.folder.join(format!("m{}.npy", self.buffers.len()));
            addresses.extend(copier.save(start, bytes, &file)?);
            self.buffers.push(Buffer { address: start, bytes });
        }
        Ok(())
    }

    /// Copies the memory again. The launch may have failed, or may fail now.
    fn save_after(&self) -> Result<(), String> {
        let mut copier = Copier::new()?;
        copier.wait()?;
        for (at, buffer) in self.buffers.iter().enumerate() {
            copier.save(buffer.address, buffer.bytes, &self.folder.join(format!("m{at}.after.npy")))?;
        }
        Ok(())
    }

    /// Completes the record after the launch.
    fn end(mut self, status: Status) {
        if status != 0 {
            self.refused.get_or_insert(format!("the launch failed with error {status}"));
        } else if self.after
            && let Err(why) = self.save_after()
        {
            self.refused = Some(format!("after the launch, {why}"));
        }
        let mut text = self.head;
        let buffers = self.buffers.iter().enumerate().map(|(at, buffer)| {
            let after = if self.after { format!("\"m{at}.after.npy\"") } else { "null".to_owned() };
            let Buffer { address, bytes } = buffer;
            format!(r#"{{"address":{address},"bytes":{bytes},"file":"m{at}.npy","after":{after}}}"#)
        });
        let refused = self.refused.as_deref().map_or("null".to_owned(), quoted);
        let _ =
            write!(text, r#""buffers":[{}],"refused":{refused}}}"#, buffers.collect::<Vec<_>>().join(","));
        // A record without its file is ignored.
        let _ = std::fs::write(self.folder.join("record.json"), text);
    }
}

/// The tensor maps in the parameters, by number and byte.
fn maps(state: &State, params: &[Vec<u8>]) -> Vec<(usize, usize, TensorMap)> {
    let mut found = Vec::new();
    for (index, param) in params.iter().enumerate() {
        // A tensor map is at a multiple of 64 bytes.
        for at in (0..param.len()).step_by(64) {
            let bytes = param.get(at..at + 128).and_then(|bytes| <&[u8; 128]>::try_from(bytes).ok());
            if let Some(map) = bytes.and_then(|bytes| state.map(bytes)) {
                found.push((index, at, map.clone()));
            }
        }
    }
    found
}

/// Writes the module's image, once for each module. Returns the name of the file.
fn save_image(folder: &Path, function: &CapturedFunction) -> Result<String, String> {
    let image = function.image.bytes()?;
    let name = format!("image-{}-{:x}-{}", std::process::id(), image.as_ptr() as usize, image.len());
    let file = folder.join(&name);
    if !file.exists() {
        std::fs::write(&file, image).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(name)
}

/// The part of the record that is known before the launch.
fn head(
    launch: &Launch,
    function: &CapturedFunction,
    number: u64,
    in_graph: bool,
    image: &str,
    params: &[Vec<u8>],
    maps: &[(usize, usize, TensorMap)],
) -> String {
    let Launch { grid, block, cluster, shared, cooperative, .. } = launch;
    let hexadecimal = |bytes: &Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let params = params.iter().map(|param| format!(r#"{{"bytes":"{}"}}"#, hexadecimal(param)));
    let maps = maps.iter().map(|(param, at, map)| {
        let TensorMap { element, address, interleave, swizzle, fill, im2col, dims, strides, extents, steps } = map;
        format!(
            r#"{{"param":{param},"at":{at},"address":{address},"element":{element},"interleave":{interleave},"swizzle":{swizzle},"fill":{fill},"im2col":{im2col},"dims":{dims:?},"strides":{strides:?},"box":{extents:?},"element_strides":{steps:?}}}"#
        )
    });
    format!(
        r#"{{"kernel":{},"number":{number},"in_graph":{in_graph},"grid":{grid:?},"block":{block:?},"cluster":{cluster:?},"dynamic_shared":{shared},"cooperative":{cooperative},"capability":{},"image":"{image}","params":[{}],"maps":[{}],"#,
        quoted(&function.name),
        driver::capability(),
        params.collect::<Vec<_>>().join(","),
        maps.collect::<Vec<_>>().join(","),
    )
}

/// A text of JSON.
fn quoted(text: &str) -> String {
    let mut quoted = "\"".to_owned();
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            '\0'..='\x1f' => {
                let _ = write!(quoted, "\\u{:04x}", character as u32);
            }
            _ => quoted.push(character),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_of_a_configuration() {
        let mut value = [0; 16];
        value[..3].copy_from_slice(&[2, 1, 1]);
        let cluster = Attribute { identity: 4, padding: 0, value };
        let cooperative = Attribute { identity: 2, padding: 0, value };
        let attributes = [cluster, cooperative];
        let config = Config {
            grid: [4, 2, 1],
            block: [64, 1, 1],
            shared: 512,
            stream: 0,
            attributes: attributes.as_ptr(),
            count: 2,
        };
        assert_eq!((size_of::<Config>(), size_of::<Attribute>()), (56, 72));
        // SAFETY: a configuration as programs pass it.
        let launch = unsafe { Launch::of_config(&config, 7, std::ptr::null(), std::ptr::null()) };
        assert_eq!((launch.grid, launch.block, launch.cluster), ([4, 2, 1], [64, 1, 1], [2, 1, 1]));
        assert!(launch.cooperative && launch.shared == 512 && launch.function == 7);
    }

    #[test]
    fn texts_of_json() {
        assert_eq!(quoted("a\"b\\c\n"), r#""a\"b\\c\u000a""#);
    }
}
