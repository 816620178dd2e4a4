/* The functions of CUDA's runtime and driver, cuBLAS and NCCL that torch needs to believe in GPUs.
 *
 * Nothing is computed. Memory of the device is a range of addresses without content: allocations
 * are counted, writes are dropped, and reads give zeros. What is asked of the device is counted, and
 * `null_gpu_reset` and `null_gpu_counts` give the counts to Python. Functions that are not here
 * become stubs that return 0; build.py writes them. torch and Triton find all of them in one
 * library, which is loaded before those of NVIDIA.
 *
 * An H100 of 80 GB: sizes and limits are those of CUDA's programming guide for compute capability
 * 9.0 and of NVIDIA's data sheet.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "driver_types.h"

#define MEMORY (81559ULL << 20)
#define CONTEXT (600ULL << 20) /* what a process loses to CUDA's context */
#define FIRST_ADDRESS 0x700000000000ULL
#define PAGE (2ULL << 20)
#define NAME "NVIDIA H100 80GB HBM3"

/* Order of COUNTS in count.py. */
enum { CUDA, TRITON, PRODUCT, SYNC, EVENT_WAIT, READ, WRITE, COLLECTIVE, EXPOSED, EXPOSED_BYTES,
       COMMUNICATOR, KINDS };
static atomic_long counts[KINDS];

/* Calls and bytes of each of NCCL's operations. */
enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, ALL_TO_ALL, SEND, RECEIVE,
       OPERATIONS };
static atomic_long calls[OPERATIONS], bytes[OPERATIONS];

static void say(const char *what) {
    if (getenv("NULL_GPU_TRACE")) fprintf(stderr, "[null gpu] %s\n", what);
}
static void waits(const char *what) { counts[SYNC]++; say(what); }

void null_gpu_counts(long *out) {
    for (int i = 0; i < KINDS; i++) *out++ = counts[i];
    for (int i = 0; i < OPERATIONS; i++) { *out++ = calls[i]; *out++ = bytes[i]; }
}

/* ---- devices ------------------------------------------------------------------------------- */

static int devices(void) {
    const char *n = getenv("NULL_GPU_DEVICES");
    return n ? atoi(n) : 1;
}
static __thread int current;
int cudaGetDeviceCount(int *n) { *n = devices(); return 0; }
int cudaGetDevice(int *d) { *d = current; return 0; }
int cudaSetDevice(int d) { current = d; return 0; }
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, NAME);
    p->totalGlobalMem = MEMORY;
    p->major = 9;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerMultiprocessor = p->regsPerBlock = 65536;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 227 << 10;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->l2CacheSize = 50 << 20;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxBlocksPerMultiProcessor = 32;
    p->unifiedAddressing = p->managedMemory = p->concurrentKernels = p->ECCEnabled = 1;
    p->cooperativeLaunch = 1;
    p->asyncEngineCount = 3;
    p->memoryBusWidth = 5120;
    p->textureAlignment = 512;
    return 0;
}
static int attribute(int which) {
    switch (which) {
    case 10: return 32;      /* warp */
    case 12: return 65536;   /* registers of a block */
    case 13: return 1980000; /* clock, kHz */
    case 16: return 132;     /* multiprocessors */
    case 36: return 2619000; /* memory clock, kHz */
    case 37: return 5120;    /* memory bus, bits */
    case 75: return 9;       /* compute capability */
    case 76: return 0;
    case 97: return 227 << 10; /* shared memory of a block at most */
    default: return 1;
    }
}
int cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = attribute(a); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = attribute(a); return 0; }
int cudaDeviceGetPCIBusId(char *s, int n, int d) {
    snprintf(s, n, "0000:%02x:00.0", d + 1);
    return 0;
}
int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return 0; }
int cudaDriverGetVersion(int *v) { *v = NULL_CUDA_VERSION; return 0; }
int cudaRuntimeGetVersion(int *v) { *v = NULL_CUDA_VERSION; return 0; }
int cuDriverGetVersion(int *v) { *v = NULL_CUDA_VERSION; return 0; }
const char *cudaGetErrorName(cudaError_t e) { return e == 2 ? "cudaErrorMemoryAllocation" : "null"; }
const char *cudaGetErrorString(cudaError_t e) { return e == 2 ? "out of memory" : "null"; }
int cuGetErrorString(int e, const char **s) { *s = "null"; return 0; }
int cuGetErrorName(int e, const char **s) { *s = "null"; return 0; }
int cuDeviceGet(int *d, int number) { *d = number; return 0; }
int cuDeviceGetCount(int *n) { *n = devices(); return 0; }
int cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, NAME); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { *n = MEMORY; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
int cuCtxGetDevice(int *d) { *d = current; return 0; }

/* ---- memory -------------------------------------------------------------------------------- */

static atomic_ullong used, next_address = FIRST_ADDRESS;
#define SLOTS (1 << 20)
static struct { uintptr_t at; size_t size; } table[SLOTS];

static size_t slot(uintptr_t at) { return (at >> 9) * 2654435761ULL % SLOTS; }
static int on_device(const void *p) {
    return (uintptr_t)p >= FIRST_ADDRESS && (uintptr_t)p < next_address;
}
int cudaMalloc(void **p, size_t n) {
    n = (n + 511) & ~511ULL;
    if (used + n > MEMORY - CONTEXT) return cudaErrorMemoryAllocation;
    used += n;
    uintptr_t at = atomic_fetch_add(&next_address, (n + 2 * PAGE - 1) & ~(PAGE - 1));
    size_t i = slot(at);
    while (table[i].at > 1) i = (i + 1) % SLOTS;
    table[i].at = at;
    table[i].size = n;
    *p = (void *)at;
    return 0;
}
int cudaFree(void *p) {
    for (size_t i = slot((uintptr_t)p), tried = 0; p && table[i].at && tried < SLOTS; tried++) {
        if (table[i].at == (uintptr_t)p) {
            used -= table[i].size;
            table[i].at = 1; /* it was in use: a search goes on */
            return 0;
        }
        i = (i + 1) % SLOTS;
    }
    return 0;
}
int cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
int cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
int cudaMemGetInfo(size_t *left, size_t *all) {
    *all = MEMORY;
    *left = MEMORY - CONTEXT - used;
    return 0;
}
int cuMemGetAllocationGranularity(size_t *n, void *p, int o) { *n = PAGE; return 0; }

#define PINNED 4096
static struct { char *at; size_t size; } pinned[PINNED];
static int is_pinned(const void *p) {
    for (int i = 0; i < PINNED; i++)
        if (pinned[i].at && (char *)p >= pinned[i].at && (char *)p < pinned[i].at + pinned[i].size)
            return 1;
    return 0;
}
int cudaHostAlloc(void **p, size_t n, unsigned flags) {
    *p = calloc(1, n ? n : 1);
    for (int i = 0; i < PINNED; i++)
        if (!pinned[i].at) { pinned[i].at = *p; pinned[i].size = n; break; }
    return 0;
}
int cudaFreeHost(void *p) {
    for (int i = 0; i < PINNED; i++)
        if (pinned[i].at == p) pinned[i].at = 0;
    free(p);
    return 0;
}
int cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->type = on_device(p) ? cudaMemoryTypeDevice
            : is_pinned(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    a->devicePointer = a->hostPointer = (void *)p;
    return 0;
}
int cuPointerGetAttribute(void *out, int which, uintptr_t p) {
    if (which == 3) *(uintptr_t *)out = p; /* its address on the device */
    else *(int *)out = 2;                  /* its kind: the device's */
    return 0;
}
/* A copy from the device waits for it, unless it goes to pinned memory. */
static void copy(void *to, const void *from, size_t n, int blocking) {
    int reads = on_device(from) && !on_device(to), writes = on_device(to) && !on_device(from);
    counts[READ] += reads;
    counts[WRITE] += writes;
    if (reads) memset(to, 0, n);
    else if (!writes && !on_device(to)) memcpy(to, from, n);
    if (blocking || (reads && !is_pinned(to))) waits("copy");
}
int cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) {
    copy(to, from, n, 1);
    return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
    copy(to, from, n, 0);
    return 0;
}
int cudaGetSymbolAddress(void **p, const void *symbol) { *p = (void *)FIRST_ADDRESS; return 0; }

/* ---- streams, events, and which collective a stream waits for at once ----------------------- */

#define HANDLES (1 << 16)
#define PENDING (1 << 12)
static atomic_ullong next_handle = 1; /* 0 is the default stream */
struct collective { long number, bytes, products; };
static struct collective pending[PENDING]; /* those that no stream has waited for */
static int n_pending;
static long n_started, last_of[HANDLES]; /* the last collective before an event, or of a stream */
static atomic_flag busy = ATOMIC_FLAG_INIT;
static void enter(void) { while (atomic_flag_test_and_set(&busy)); }
static void leave(void) { atomic_flag_clear(&busy); }
static size_t index_of(const void *handle) { return (uintptr_t)handle / 16 % HANDLES; }

int cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    *s = (cudaStream_t)(uintptr_t)(16 * next_handle++);
    return 0;
}
int cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    *e = (cudaEvent_t)(uintptr_t)(16 * next_handle++);
    return 0;
}
int cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
int cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
    last_of[index_of(e)] = s ? last_of[index_of(s)] : 0;
    return 0;
}
int cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
int cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    long last = last_of[index_of(e)];
    if (!last || (s && last_of[index_of(s)] >= last)) return 0;
    if (s) { last_of[index_of(s)] = last; return 0; } /* a stream of its own may wait */
    enter();
    int kept = 0;
    for (int i = 0; i < n_pending; i++) {
        struct collective each = pending[i];
        if (each.number > last) { pending[kept++] = each; continue; }
        if (each.products == counts[PRODUCT]) {
            counts[EXPOSED]++;
            counts[EXPOSED_BYTES] += each.bytes;
        }
    }
    n_pending = kept;
    leave();
    return 0;
}
/* What is under way stays so: a step may wait for what the one before has started. */
void null_gpu_reset(void) {
    enter();
    for (int i = 0; i < n_pending; i++) pending[i].products -= counts[PRODUCT];
    for (int i = 0; i < KINDS; i++) counts[i] = 0;
    for (int i = 0; i < OPERATIONS; i++) calls[i] = bytes[i] = 0;
    leave();
}
static void collective(int operation, long n, cudaStream_t s) {
    counts[COLLECTIVE]++;
    calls[operation]++;
    bytes[operation] += n;
    if (!s) { /* on the stream that computes */
        counts[EXPOSED]++;
        counts[EXPOSED_BYTES] += n;
        return;
    }
    enter();
    last_of[index_of(s)] = ++n_started;
    if (n_pending < PENDING) {
        struct collective each = {n_started, n, counts[PRODUCT]};
        pending[n_pending++] = each;
    }
    leave();
}
int cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return 0; }
int cudaEventSynchronize(cudaEvent_t e) { counts[EVENT_WAIT]++; say("event"); return 0; }
int cudaStreamSynchronize(cudaStream_t s) { waits("stream"); return 0; }
int cudaDeviceSynchronize(void) { waits("device"); return 0; }
int cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = 0; return 0; }
int cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id,
                             void *graph, void *edges, void *more, size_t *n) {
    if (c) *c = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return 0;
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
}

/* ---- kernels ------------------------------------------------------------------------------- */

int cudaLaunchKernelExC(const void *c, const void *f, void **a) { counts[CUDA]++; return 0; }
int cudaLaunchKernel(void) { counts[CUDA]++; return 0; }
int __cudaLaunchKernel(void) { counts[CUDA]++; return 0; }
int cuLaunchKernel(void) { counts[TRITON]++; return 0; }
int cuLaunchKernelEx(void) { counts[TRITON]++; return 0; }
int cuLaunchCooperativeKernel(void) { counts[TRITON]++; return 0; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->binaryVersion = a->ptxVersion = 90;
    return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s,
                                                           unsigned flags) {
    *n = 2;
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) {
    *n = 2;
    return 0;
}
int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { *n = 1; return 0; }
int cuModuleLoadData(void **m, const void *image) { *m = (void *)1; return 0; }
int cuModuleLoad(void **m, const char *file) { *m = (void *)1; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) { *f = (void *)1; return 0; }
int cuFuncGetAttribute(int *v, int which, void *f) {
    *v = which == 0 ? 1024 : which == 4 ? 32 : 0; /* threads of a block, registers of a thread */
    return 0;
}
void **__cudaRegisterFatBinary(void *f) { static void *handle[4]; return handle; }
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **h) { return 1; }
int __cudaGetKernel(void **k, const void *f) { *k = (void *)f; return 0; }
int __cudaPopCallConfiguration(unsigned *grid, unsigned *block, size_t *shared, void **stream) {
    for (int i = 0; i < 3; i++) grid[i] = block[i] = 1;
    if (shared) *shared = 0;
    if (stream) *stream = 0;
    return 0;
}
static int nothing(void) { return 0; }
static void *entry(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    return found ? found : (void *)nothing;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version,
                                     unsigned long long flags,
                                     enum cudaDriverEntryPointQueryResult *r) {
    *f = entry(name);
    if (r) *r = cudaDriverEntryPointSuccess;
    return 0;
}
int cuGetProcAddress_v2(const char *name, void **f, int version, uint64_t flags, void *r) {
    *f = entry(name);
    return 0;
}

/* ---- matrix products ----------------------------------------------------------------------- */

#define GEMM(name) int name(void) { counts[PRODUCT]++; counts[CUDA]++; return 0; }
GEMM(cublasLtMatmul)
GEMM(cublasGemmEx)
GEMM(cublasGemmEx_64)
GEMM(cublasSgemm_v2)
GEMM(cublasSgemm_v2_64)
GEMM(cublasDgemm_v2)
GEMM(cublasGemmStridedBatchedEx)
GEMM(cublasGemmStridedBatchedEx_64)
GEMM(cublasSgemmStridedBatched)
GEMM(cublasGemmGroupedBatchedEx)
int cublasGetVersion_v2(void *h, int *v) { *v = 130100; return 0; }
size_t cublasLtGetVersion(void) { return 130100; }
/* An answer of cublasLtMatmulHeuristicResult_t has 104 bytes. */
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *dd, void *p,
                                   int asked, char *answers, int *n) {
    memset(answers, 0, 104 * asked);
    *n = 1;
    return 0;
}
size_t cudnnGetVersion(void) { return 91900; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int e) { return "null"; }
int cudnnGetProperty(int which, int *v) { *v = which == 0 ? 9 : which == 1 ? 19 : 0; return 0; }

/* ---- NCCL ---------------------------------------------------------------------------------- */

struct communicator { int rank, size; };
typedef struct { char bytes[128]; } identity;
static int next_size = 1;
/* Number of ranks of the groups that are made next: a split tells NCCL only this one's colour. */
void null_gpu_group_of(int size) { next_size = size; }

static int communicator(void **c, int rank, int size) {
    struct communicator *made = malloc(sizeof *made);
    made->rank = rank;
    made->size = size;
    counts[COMMUNICATOR]++;
    *c = made;
    return 0;
}
int ncclCommInitRank(void **c, int n, identity id, int r) { return communicator(c, r, n); }
int ncclCommInitRankConfig(void **c, int n, identity id, int r, void *config) {
    return communicator(c, r, n);
}
int ncclCommInitRankScalable(void **c, int n, int r, int ids, void *id, void *config) {
    return communicator(c, r, n);
}
int ncclCommSplit(void *c, int colour, int rank, void **out, void *config) {
    if (colour < 0) { *out = 0; return 0; } /* this rank is in no part */
    return communicator(out, rank, next_size);
}
int ncclCommGetAsyncError(void *c, int *e) { *e = 0; return 0; }
int ncclCommCount(void *c, int *n) { *n = ((struct communicator *)c)->size; return 0; }
int ncclCommUserRank(void *c, int *n) { *n = ((struct communicator *)c)->rank; return 0; }
int ncclCommCuDevice(void *c, int *n) { *n = current; return 0; }
int ncclGetVersion(int *v) { *v = 22809; return 0; }
int ncclGetUniqueId(char *id) { memset(id, 7, 128); return 0; }
const char *ncclGetErrorString(int e) { return "null"; }
const char *ncclGetLastError(void *c) { return ""; }

/* Sizes of ncclDataType_t, from int8 to the two forms of 8-bit floating point. */
static long size_of(int type) {
    static const char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type < (int)sizeof sizes ? sizes[type] : 1;
}
static long ranks(void *c) { return ((struct communicator *)c)->size; }
/* Bytes are those of the whole: what is reduced, and what all ranks have gathered or scatter. */
int ncclAllReduce(const void *a, void *b, size_t n, int t, int op, void *c, cudaStream_t s) {
    collective(ALL_REDUCE, n * size_of(t), s);
    return 0;
}
int ncclReduceScatter(const void *a, void *b, size_t n, int t, int op, void *c, cudaStream_t s) {
    collective(REDUCE_SCATTER, n * size_of(t) * ranks(c), s);
    return 0;
}
int ncclAllGather(const void *a, void *b, size_t n, int t, void *c, cudaStream_t s) {
    collective(ALL_GATHER, n * size_of(t) * ranks(c), s);
    return 0;
}
int ncclBroadcast(const void *a, void *b, size_t n, int t, int root, void *c, cudaStream_t s) {
    collective(BROADCAST, n * size_of(t), s);
    return 0;
}
int ncclReduce(const void *a, void *b, size_t n, int t, int op, int root, void *c, cudaStream_t s) {
    collective(REDUCE, n * size_of(t), s);
    return 0;
}
int ncclAlltoAll(const void *a, void *b, size_t n, int t, void *c, cudaStream_t s) {
    collective(ALL_TO_ALL, n * size_of(t) * ranks(c), s);
    return 0;
}
int ncclSend(const void *a, size_t n, int t, int peer, void *c, cudaStream_t s) {
    collective(SEND, n * size_of(t), s);
    return 0;
}
int ncclRecv(void *a, size_t n, int t, int peer, void *c, cudaStream_t s) {
    collective(RECEIVE, n * size_of(t), s);
    return 0;
}
