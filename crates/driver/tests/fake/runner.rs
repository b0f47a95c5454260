//! Runs a launch that the fake driver wrote to a file in the emulator. A program that `FAKE_RUNNER` names has
//! a test named `runner` that calls [`emulate_given`].

use std::path::Path;

use ptx::{Access, Arg, BufferSpec, Dim3, Kernel, L2Promotion, Launch, Machine, Swizzle, TensorMapSpec};

/// Runs the launch in the file that the environment names. Does nothing without one.
pub fn emulate_given() {
    if let Some(path) = std::env::var_os("FAKE_LAUNCH") {
        emulate(Path::new(&path));
    }
}

/// Runs the launch in the file and writes the resulting memory to the file.
fn emulate(path: &Path) {
    let bytes = std::fs::read(path).unwrap();
    let head_ends = bytes.windows(2).position(|pair| pair == b"\n\n").unwrap();
    let head = std::str::from_utf8(&bytes[..head_ends]).unwrap();
    let mut lines = head.lines();
    let entry = lines.next().unwrap().to_owned();
    let numbers = |line: &str| -> Vec<u64> { line.split_whitespace().map(|n| n.parse().unwrap()).collect() };
    let shape: Vec<u32> = numbers(lines.next().unwrap()).into_iter().map(|n| n as u32).collect();
    let params = numbers(lines.next().unwrap());
    let (text, mut rest) = bytes[head_ends + 2..].split_at(numbers(lines.next().unwrap())[0] as usize);
    let allocations: Vec<(u64, usize)> = lines.map(numbers).map(|line| (line[0], line[1] as usize)).collect();

    let module = ptx::parse(std::str::from_utf8(text).unwrap()).unwrap().verify().unwrap();
    let sizes: Vec<u32> = module.function(&entry).unwrap().params.iter().map(ptx::Param::bytes).collect();
    let place = |address: u64| {
        let inside = |&(start, length): &(u64, usize)| (start..start + length as u64).contains(&address);
        let index = allocations.iter().position(inside)?;
        Some((index, address - allocations[index].0))
    };
    let (mut words, mut args, mut tensor_maps) = (params.as_slice(), Vec::new(), Vec::new());
    for size in sizes {
        let (own, rest) = words.split_at(size.div_ceil(8) as usize);
        words = rest;
        args.push(match (size, place(own[0])) {
            (TensorMapSpec::BYTES, Some(place)) => {
                tensor_maps.push(tensor_map(own, place));
                Arg::TensorMap { index: tensor_maps.len() - 1 }
            }
            (8, Some((index, offset))) => Arg::Buffer { index, offset },
            (8, None) => Arg::U64(own[0]),
            _ => Arg::U32(own[0] as u32),
        });
    }
    let spec = |&(address, bytes): &(u64, usize)| BufferSpec {
        name: format!("{address:#x}"),
        bytes,
        access: Access::ReadWrite,
    };
    let kernel = Kernel {
        args,
        buffers: allocations.iter().map(spec).collect(),
        launch: Launch {
            cluster: Dim3(shape[7], shape[8], shape[9]),
            dynamic_shared: shape[6],
            ..Launch::new(Dim3(shape[0], shape[1], shape[2]), Dim3(shape[3], shape[4], shape[5]))
        },
        tensor_maps,
        module,
        entry,
    };
    let mut machine = emu::Emulator::new(emu::Options::default());
    let mut buffers: Vec<emu::Buffer> = Vec::new();
    for &(_, length) in &allocations {
        let (contents, after) = rest.split_at(length);
        let mut buffer = machine.allocate(length).unwrap();
        machine.upload(&mut buffer, contents).unwrap();
        buffers.push(buffer);
        rest = after;
    }
    machine.launch(&kernel, &mut buffers.iter_mut().collect::<Vec<_>>()).unwrap();
    let mut after = Vec::new();
    for (buffer, &(_, length)) in buffers.iter().zip(&allocations) {
        let mut contents = vec![0; length];
        machine.download(buffer, &mut contents).unwrap();
        after.extend(contents);
    }
    std::fs::write(path, after).unwrap();
}

/// Decodes a tensor map of the fake driver.
fn tensor_map(words: &[u64], (buffer, offset): (usize, u64)) -> TensorMapSpec {
    let rank = (words[1] & 0xff) as usize;
    TensorMapSpec {
        buffer,
        offset,
        // CUtensorMapDataType and CUtensorMapSwizzle.
        element: match words[1] >> 8 & 0xff {
            6 => ptx::Element::F16,
            9 => ptx::Element::Bf16,
            other => panic!("element {other}"),
        },
        swizzle: [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128]
            [(words[1] >> 16) as usize],
        extents: words[2..2 + rank].to_vec(),
        strides: words[7..6 + rank].to_vec(),
        box_extents: words[11..11 + rank].iter().map(|&n| n as u32).collect(),
        l2_promotion: L2Promotion::default(),
        wraps: false,
    }
}
