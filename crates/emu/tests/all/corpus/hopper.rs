//! Tests of kernels for sm_90a, from CUDA C++ and from Triton: bulk tensor copies, warpgroup products and
//! clusters. One kernel of Triton is for sm_100a, with products in tensor memory.

use ptx::{Arg, Dim3, Element, Kernel, L2Promotion, Swizzle, TensorMapSpec};

use super::cuda::case;
use super::{Data, assert_close, draw, f16s, f32s, floats, halves, read, reference, triton};

/// The tensor map of a whole matrix whose rows are contiguous.
fn map(
    buffer: usize,
    element: Element,
    [rows, columns]: [u64; 2],
    side: u32,
    swizzle: Swizzle,
) -> TensorMapSpec {
    TensorMapSpec {
        buffer,
        offset: 0,
        element,
        extents: vec![columns, rows],
        strides: vec![columns * u64::from(element.bytes())],
        box_extents: vec![side, side],
        swizzle,
        l2_promotion: L2Promotion::default(),
        wraps: false,
    }
}

/// The last boxes extend beyond the matrix in both dimensions.
#[test]
fn boxes_come_and_go_through_shared_memory() {
    let (rows, columns) = (150, 120);
    let input = draw(rows * columns, 1);
    let case = case(
        "hopper_copy",
        Dim3(columns.div_ceil(32) as u32, 1, 1),
        Dim3(128, 1, 1),
        vec![("in", floats(&input)), ("out", Data::Out(4 * rows * columns))],
        &[],
    );
    let extents = [rows as u64, columns as u64];
    let Some(kernel) = case.kernel("90a") else { return };
    let kernel = Kernel {
        tensor_maps: [0, 1].map(|buffer| map(buffer, Element::F32, extents, 32, Swizzle::None)).into(),
        args: vec![
            Arg::TensorMap { index: 0 },
            Arg::TensorMap { index: 1 },
            Arg::I32(rows.div_ceil(32) as i32),
        ],
        ..kernel
    };
    let expected: Vec<f64> = input.iter().map(|x| f64::from(2.0 * x + 1.0)).collect();
    case.check_kernel(&kernel, |buffers| assert_close("out", &f32s(&buffers[1]), &expected, 0.0));
}

#[test]
fn a_warpgroup_multiplies_from_core_matrices_and_registers() {
    let (m, n, depth) = (128, 192, 64);
    let (a, b) = (draw(m * depth, 2), draw(n * depth, 3));
    let case = case(
        "hopper_gemm",
        Dim3(3, 2, 1),
        Dim3(128, 1, 1),
        vec![("a", halves(&a)), ("b", halves(&b)), ("c", Data::Out(4 * m * n))],
        &[Arg::I32(n as i32)],
    );
    let expected = reference::matmul(&a, depth, n, |col, k| b[col * depth + k]);
    case.check_on(&["90a"], |buffers| assert_close("c", &f32s(&buffers[2]), &expected, 1e-5));
}

#[test]
fn a_cluster_sums_in_the_memory_of_its_first_cta() {
    let (clusters, elements) = (3, 3000);
    let input = draw(elements, 4);
    let case = case(
        "hopper_cluster_sum",
        Dim3(4 * clusters as u32, 1, 1),
        Dim3(128, 1, 1),
        vec![("in", floats(&input)), ("sums", Data::Out(4 * clusters)), ("agreed", Data::Out(16 * clusters))],
        &[Arg::I32(elements as i32)],
    );
    let Some(mut kernel) = case.kernel("90a") else { return };
    kernel.launch.cluster = Dim3(4, 1, 1);
    let stride = 4 * clusters * 128;
    let cluster = |c: usize| {
        let own = input.iter().enumerate().filter(|(i, _)| i % stride / 512 == c);
        own.map(|(_, &x)| f64::from(x)).sum::<f64>()
    };
    let expected: Vec<f64> = (0..clusters).map(cluster).collect();
    case.check_kernel(&kernel, |buffers| {
        assert_close("sums", &f32s(&buffers[1]), &expected, 1e-4);
        assert!(read(&buffers[2], u32::from_le_bytes).iter().all(|&agreed| agreed == 1));
    });
}

#[test]
fn triton_multiplies_with_wgmma() {
    triton::matmul_on(&["90a"], 24576, 5);
}

#[test]
fn triton_attends_with_wgmma() {
    triton::flash_on(&["90a"], 24576, 7);
}

#[test]
fn triton_multiplies_in_tensor_memory() {
    triton::matmul_on(&["100a"], 24592, 5);
}

/// Triton puts a barrier, but no fence, between the initialisation of an mbarrier and the copy that completes
/// on it. That is enough: a copy accesses its mbarrier through the generic proxy (PTX ISA 9.4,
/// "cp.async.bulk.tensor").
#[test]
fn triton_multiplies_boxes_of_tensor_maps() {
    let (m, n, depth) = (100, 120, 192);
    let (a, b) = (draw(m * depth, 10), draw(depth * n, 11));
    let case = triton::case(
        "triton_tma_matmul",
        (Dim3(2, 2, 1), 128, 49176),
        vec![("a", halves(&a)), ("b", halves(&b)), ("c", Data::Out(2 * m * n))],
        &[],
    );
    let matrices = [[m, depth], [depth, n], [m, n]].map(|extents| extents.map(|n| n as u64));
    // Each descriptor is a tensor map, followed by the extents and strides from which it was made.
    let described = matrices.iter().enumerate().flat_map(|(index, &[rows, columns])| {
        let (rows, columns) = (rows as u32, columns);
        [Arg::TensorMap { index }, Arg::U32(rows), Arg::U32(columns as u32), Arg::U64(columns), Arg::U64(1)]
    });
    let kernel = case.kernel("90a").expect("a file of the corpus");
    let kernel = Kernel {
        tensor_maps: (0..3).map(|i| map(i, Element::F16, matrices[i], 64, Swizzle::Bytes128)).collect(),
        args: described.chain([Arg::I32(depth as i32), Arg::Null, Arg::Null]).collect(),
        ..kernel
    };
    let expected = reference::matmul(&a, depth, n, |col, k| b[k * n + col]);
    case.check_kernel(&kernel, |buffers| {
        assert_close("c", &f16s(&buffers[2]), &expected, 16.0 / 2048.0);
    });
}
