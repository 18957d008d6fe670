/* A stand-in for the CANN runtime (libascendcl): host memory is device memory, every call has ended when it returns.
 * Declared after how torch_npu calls it. stubs.py reads the names of the functions at the beginning of lines. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define OK 0
#define NO_DEVICE 107001
#define NO_MEMORY 207001
#define NO_OPERATOR 500002
#define GIB ((size_t)1 << 30)

static _Thread_local int32_t device = 0;
static int64_t options[64];

static int allocate(void **p, size_t bytes) {
    size_t n = bytes ? bytes : 512;
    if (posix_memalign(p, 512, n)) return NO_MEMORY;
    memset(*p, 0, n);
    return OK;
}

static int token(void **p) {
    *p = malloc(64);
    return *p ? OK : NO_MEMORY;
}

/* devices */
int aclrtGetDeviceCount(uint32_t *n) { if (n) *n = STUB_DEVICES; return OK; }
int aclrtGetDevice(int32_t *d) { if (d) *d = device; return STUB_DEVICES ? OK : NO_DEVICE; }
int aclrtSetDevice(int32_t d) { if (d < 0 || d >= STUB_DEVICES) return NO_DEVICE; device = d; return OK; }
const char *aclrtGetSocName(void) { return STUB_SOC; }
const char *aclGetRecentErrMsg(void) { return "this CANN is a stub: it runs no operator"; }
int aclrtGetCurrentContext(void **c) { static int contexts[64]; if (c) *c = &contexts[device & 63]; return OK; }
int aclrtSetCurrentContext(void *c) { (void)c; return OK; }
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t d, int32_t p) { (void)d; (void)p; if (can) *can = 0; return OK; }
int aclrtGetPrimaryCtxState(int32_t d, uint32_t *f, int32_t *a) { (void)d; if (f) *f = 0; if (a) *a = 1; return OK; }
int aclrtPeekAtLastError(int level) { (void)level; return OK; }
int aclrtGetLastError(int level) { (void)level; return OK; }

/* memory */
int aclrtGetMemInfo(int what, size_t *now, size_t *all) {
    (void)what;
    if (now) *now = 32 * GIB;
    if (all) *all = 64 * GIB;
    return OK;
}
int aclrtMalloc(void **p, size_t n, int policy) { (void)policy; return allocate(p, n); }
int aclrtMallocAlign32(void **p, size_t n, int policy) { (void)policy; return allocate(p, n); }
int aclrtMallocHost(void **p, size_t n) { return allocate(p, n); }
int aclrtFree(void *p) { free(p); return OK; }
int aclrtFreeHost(void *p) { free(p); return OK; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t n, int kind) {
    (void)kind;
    if (n > room) return NO_MEMORY;
    memmove(to, from, n);
    return OK;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t n, int kind, void *stream) {
    (void)stream;
    return aclrtMemcpy(to, room, from, n, kind);
}
int aclrtMemset(void *to, size_t room, int value, size_t n) { (void)room; memset(to, value, n); return OK; }
int aclrtMemsetAsync(void *to, size_t room, int value, size_t n, void *stream) {
    (void)stream;
    return aclrtMemset(to, room, value, n);
}
int aclrtPointerGetAttributes(const void *p, void *what) { (void)p; if (what) memset(what, 0, 64); return OK; }

/* streams and events: tokens, as nothing runs later */
int aclrtCreateStream(void **s) { return token(s); }
int aclrtCreateStreamWithConfig(void **s, uint32_t priority, uint32_t f) { (void)priority; (void)f; return token(s); }
int aclrtDestroyStream(void *s) { free(s); return OK; }
int aclrtDestroyStreamForce(void *s) { free(s); return OK; }
int aclrtStreamGetId(void *s, int32_t *id) { (void)s; if (id) *id = 0; return OK; }
int aclrtStreamQuery(void *s, int *state) { (void)s; if (state) *state = 0; return OK; }
int aclrtSetStreamFailureMode(void *s, uint64_t mode) { (void)s; (void)mode; return OK; }
int aclrtSynchronizeDevice(void) { return OK; }
int aclrtSynchronizeDeviceWithTimeout(int32_t t) { (void)t; return OK; }
int aclrtSynchronizeStreamWithTimeout(void *s, int32_t t) { (void)s; (void)t; return OK; }
int aclrtCreateEventWithFlag(void **e, uint32_t f) { (void)f; return token(e); }
int aclrtCreateEventExWithFlag(void **e, uint32_t f) { (void)f; return token(e); }
int aclrtDestroyEvent(void *e) { free(e); return OK; }
int aclrtQueryEventStatus(void *e, int *state) { (void)e; if (state) *state = 1; return OK; }
int aclrtQueryEventWaitStatus(void *e, int *state) { (void)e; if (state) *state = 0; return OK; }
int aclrtEventElapsedTime(float *ms, void *a, void *b) { (void)a; (void)b; if (ms) *ms = 0.f; return OK; }

/* options */
int aclrtSetDeviceSatMode(int mode) { (void)mode; return OK; }
int aclrtSetOpWaitTimeout(uint32_t s) { (void)s; return OK; }
int aclrtSetOpExecuteTimeOut(uint32_t s) { (void)s; return OK; }
int aclrtCtxSetSysParamOpt(int o, int64_t v) { options[o & 63] = v; return OK; }
int aclrtSetSysParamOpt(int o, int64_t v) { options[o & 63] = v; return OK; }
int aclrtGetSysParamOpt(int o, int64_t *v) { if (v) *v = options[o & 63]; return OK; }
int aclSetCompileopt(int o, const char *v) { (void)o; (void)v; return OK; }
size_t aclGetCompileoptSize(int o) { (void)o; return 8; }
int aclGetCompileopt(int o, char *v, size_t n) { (void)o; if (v && n) v[0] = 0; return OK; }

/* What describes an operator's call may be made and freed. The call itself is refused, so that nothing gives garbage,
 * but for two that torch_npu runs below its dispatcher, where nothing can replace them, to pad a row of bytes for an
 * all_gather of a list, a broadcast or a scatter: Fill, and PadV3 behind the end of a [1, n]. */
typedef struct { void *data; size_t bytes; } buffer_t;
typedef struct { int dtype; } type_t;

void *aclopCreateAttr(void) { return malloc(64); }
void aclopDestroyAttr(void *p) { free(p); }
void *aclCreateDataBuffer(void *data, size_t bytes) {
    buffer_t *b = malloc(sizeof *b);
    *b = (buffer_t){data, bytes};
    return b;
}
int aclDestroyDataBuffer(void *p) { free(p); return OK; }
void *aclCreateTensorDesc(int dtype, int rank, const int64_t *sizes, int format) {
    (void)rank; (void)sizes; (void)format;
    type_t *t = malloc(sizeof *t);
    *t = (type_t){dtype};
    return t;
}
void aclDestroyTensorDesc(void *p) { free(p); }

static size_t width(int dtype) { /* aclDataType: f32 f16 i8 i32 u8 - i16 u16 u32 i64 u64 f64 bool, bf16 */
    static const size_t known[] = {4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1};
    return dtype == 27 ? 2 : dtype >= 0 && dtype < 13 ? known[dtype] : 0;
}

/* `value` again and again, from `at` to the end of `out` */
static int fill(buffer_t *out, size_t at, const buffer_t *value, size_t bytes) {
    if (!bytes || value->bytes < bytes) return NO_OPERATOR;
    for (; at + bytes <= out->bytes; at += bytes) memcpy((char *)out->data + at, value->data, bytes);
    return OK;
}

static int pad(buffer_t *out, buffer_t **in, size_t bytes) {
    const int32_t *pads = in[1]->data; /* before and behind of each dimension */
    if (in[1]->bytes != 4 * sizeof *pads || pads[0] || pads[1] || pads[2] || in[0]->bytes > out->bytes) {
        return NO_OPERATOR;
    }
    memcpy(out->data, in[0]->data, in[0]->bytes);
    return fill(out, in[0]->bytes, in[2], bytes);
}

int aclopCompileAndExecute(const char *name, int inputs, type_t **in_types, buffer_t **in, int outputs,
                           type_t **out_types, buffer_t **out) { /* and more, not looked at */
    (void)in_types;
    size_t bytes = outputs == 1 ? width(out_types[0]->dtype) : 0;
    if (!strcmp(name, "Fill") && inputs == 2) return fill(out[0], 0, in[1], bytes);
    if (!strcmp(name, "PadV3") && inputs == 3) return pad(out[0], in, bytes);
    return NO_OPERATOR;
}
