/* A FAKE of the Neuron runtime library for tests; it is not MediaTek's library, and no NPU is involved.
 *
 * A fake .dla is a line of text: fault, number of inputs, their sizes, number of outputs, their sizes.
 * Output number k is, in float32: out[i] = i + k + sum over inputs n and elements j of (n + 1)(j + 1) in[n][j].
 *
 * As users saw on a device, it reads and writes the memory that the descriptors of the FIRST run point to.
 * Faults: none; latch: also the contents of the inputs are those of the first run; zeros; fails, from the third run on.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { void *buffer; size_t length; int fd, offset; uint64_t reserved2, reserved3; } IOBuffer;
typedef struct { IOBuffer *inputs, *outputs; } Request;
typedef struct { uint8_t major, minor, patch; } Version;
typedef struct {
    char fault[16];
    size_t count[2], sizes[2][16];
    void *memory[2][16];
    void *latched[16];
    int runs;
} Program;

static int alive = 0; /* programs that are not released */

int fake_alive(void) { return alive; }

int NeuronRuntime_getVersion(Version *version) {
    *version = (Version){8, 2, 16};
    return 0;
}

int NeuronRuntimeV2_create(const char *path, size_t threads, void **runtime, size_t backlog) {
    FILE *file = fopen(path, "r");
    Program *p = calloc(1, sizeof(Program));
    if (!file || threads != 1 || backlog != 2048) return 4;
    int ok = fscanf(file, "%15s", p->fault) == 1;
    for (int side = 0; side < 2 && ok; side++) {
        ok = fscanf(file, "%zu", &p->count[side]) == 1 && p->count[side] <= 16;
        for (size_t i = 0; i < p->count[side] && ok; i++) ok = fscanf(file, "%zu", &p->sizes[side][i]) == 1;
    }
    fclose(file);
    if (!ok) { free(p); return 4; }
    alive++;
    *runtime = p;
    return 0;
}

void NeuronRuntimeV2_release(void *runtime) {
    alive--;
    free(runtime);
}

int NeuronRuntimeV2_run(void *runtime, Request request) {
    Program *p = runtime;
    IOBuffer *given[2] = {request.inputs, request.outputs};
    for (int side = 0; side < 2; side++)
        for (size_t i = 0; i < p->count[side]; i++) {
            IOBuffer *b = &given[side][i];
            if (!b->buffer || b->length != p->sizes[side][i] || b->fd != -1 || b->offset) return 4;
            if (b->reserved2 || b->reserved3) return 4;
            if (!p->runs) p->memory[side][i] = b->buffer;
        }
    if (!strcmp(p->fault, "latch") && !p->runs)
        for (size_t i = 0; i < p->count[0]; i++) {
            p->latched[i] = malloc(p->sizes[0][i]);
            memcpy(p->latched[i], p->memory[0][i], p->sizes[0][i]);
        }
    p->runs++;
    if (!strcmp(p->fault, "fails") && p->runs > 2) return 6;
    float sum = 0;
    for (size_t n = 0; n < p->count[0]; n++) {
        float *in = p->latched[n] ? p->latched[n] : p->memory[0][n];
        for (size_t j = 0; j < p->sizes[0][n] / 4; j++) sum += (float)((n + 1) * (j + 1)) * in[j];
    }
    for (size_t k = 0; k < p->count[1]; k++)
        for (size_t i = 0; i < p->sizes[1][k] / 4; i++)
            ((float *)p->memory[1][k])[i] = strcmp(p->fault, "zeros") ? (float)(i + k) + sum : 0;
    return 0;
}

static int tell(void *runtime, int side, size_t index, size_t *size) {
    Program *p = runtime;
    if (index >= p->count[side]) return 4;
    *size = p->sizes[side][index];
    return 0;
}

int NeuronRuntimeV2_getInputNumber(void *runtime, size_t *n) { *n = ((Program *)runtime)->count[0]; return 0; }
int NeuronRuntimeV2_getOutputNumber(void *runtime, size_t *n) { *n = ((Program *)runtime)->count[1]; return 0; }
int NeuronRuntimeV2_getInputSize(void *r, uint64_t handle, size_t *size) { return tell(r, 0, handle, size); }
int NeuronRuntimeV2_getOutputSize(void *r, uint64_t handle, size_t *size) { return tell(r, 1, handle, size); }
